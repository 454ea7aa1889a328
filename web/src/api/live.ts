/**
 * Events as they happen (server-sent events): each one renews what it is about, at once. What no event tells, how far training is, is still asked for.
 *
 * The browser connects again by itself and says the last id that it has read, so that nothing is missed; while it is cut off, everything is asked for
 * as often as without a stream. A hidden tab holds no stream: once it is seen again, everything is asked for.
 */
import type { QueryClient } from '@tanstack/react-query'
import { useEffect, useState } from 'react'

import type { Event, TrainingJobSummary } from '../contract'
import { whileVisible } from './seen'

const GATHER_MS = 40 // what one decision stores comes as several events: one renewal for all
const AGAIN_MS = 5_000

/** Whether events come right now; asked by what polls. */
export const stream = { isOpen: false }

/** What an event changes, as the beginnings of query keys. */
export function renewed(event: Pick<Event, 'TrainingJobName' | 'FleetName'>, jobs: readonly Pick<TrainingJobSummary, 'TrainingJobName' | 'RunId'>[] = []): string[][] {
  const always = [['jobs'], ['incidents'], ['incident'], ['fleets'], ['nodes'], ['drills'], ['events', '', '']]
  const named = jobs.filter((job) => job.TrainingJobName === event.TrainingJobName).map((job) => job.RunId)
  const addresses = event.TrainingJobName ? [event.TrainingJobName, ...named] : [] // a page may have been opened by RunId
  const ofJob = addresses.flatMap((address) => ['job', 'protection', 'checkpoints', 'logs', 'events'].map((key) => [key, address]))
  return [...always, ...ofJob, ...(event.FleetName ? [['events', '', event.FleetName]] : [])]
}

/** What renews the queries that events change: gathered, and a key again only behind the answer that is under way, which is taken. */
export class Renewals {
  private readonly due = new Map<string, string[]>()
  private readonly underway = new Set<string>()
  private gathering?: ReturnType<typeof setTimeout>

  constructor(private readonly renew: (queryKey: string[]) => Promise<void>) {}

  add(keys: string[][]): void {
    for (const key of keys) this.due.set(key.join('\n'), key)
    this.gather()
  }

  /** Forget what is due. */
  clear(): void {
    clearTimeout(this.gathering)
    this.gathering = undefined
    this.due.clear()
  }

  private gather(): void {
    this.gathering ??= setTimeout(() => {
      this.gathering = undefined
      for (const [id, key] of this.due) {
        if (this.underway.has(id)) continue
        this.due.delete(id)
        this.underway.add(id)
        void this.renew(key).finally(() => {
          this.underway.delete(id)
          if (this.due.has(id)) this.gather()
        })
      }
    }, GATHER_MS)
  }
}

/** What is known of the stream: nothing yet, that events come, or that they do not. */
export type Liveness = 'connecting' | 'live' | 'cut'

/** Follow events for as long as the page is open and seen. */
export function useLive(client: QueryClient, isSignedIn: boolean): Liveness {
  const [liveness, setLiveness] = useState<Liveness>('connecting')
  useEffect(() => {
    if (!isSignedIn) return
    let source: EventSource
    let timer: ReturnType<typeof setTimeout> | undefined
    const renewals = new Renewals((queryKey) => client.invalidateQueries({ queryKey }))
    const set = (to: Liveness) => {
      clearTimeout(timer)
      stream.isOpen = to === 'live'
      setLiveness(to)
    }
    const connect = () => {
      timer = setTimeout(() => set('cut'), AGAIN_MS)
      source = new EventSource('/v1/events/stream')
      source.onopen = () => {
        set('live')
        void client.invalidateQueries({ predicate: (query) => query.queryKey[0] !== 'session' }) // what happened before the stream began
      }
      source.onmessage = (message: MessageEvent<string>) => {
        if (message.data) renewals.add(renewed(JSON.parse(message.data) as Event, client.getQueryData<TrainingJobSummary[]>(['jobs'])))
      }
      source.onerror = () => {
        set('cut')
        if (source.readyState !== EventSource.CLOSED) return // the browser tries again
        void client.invalidateQueries({ queryKey: ['session'] })
        timer = setTimeout(connect, AGAIN_MS)
      }
      source.addEventListener('end', () => void client.invalidateQueries({ queryKey: ['session'] }))
    }
    return whileVisible(connect, () => {
      renewals.clear()
      source.close()
      set('connecting')
    })
  }, [client, isSignedIn])
  return liveness
}
