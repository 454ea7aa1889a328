/**
 * Receives events as they happen (server-sent events). Each event renews the queries about its subject at once. The
 * progress of training has no events, so pages poll it.
 *
 * The browser reconnects by itself and sends the id of the last event that it read, so no event is missed. While the
 * stream is interrupted, pages poll everything. A hidden tab has no stream, and renews everything when it is visible.
 */
import type { QueryClient } from '@tanstack/react-query'
import { useEffect, useState } from 'react'

import type { Event, TrainingJobSummary } from '../contract'
import { whileVisible } from './seen'

const GATHER_MS = 40 // one decision of the control plane causes several events, which then cause a single renewal
const AGAIN_MS = 5_000

/** Whether the event stream is connected. Queries poll more often while it is not. */
export const stream = { isOpen: false }

type Named = Pick<TrainingJobSummary, 'TrainingJobName' | 'RunId'>
/** Return the beginnings of the keys of all queries whose data an event may have changed. */
export function renewed(event: Pick<Event, 'TrainingJobName' | 'FleetName'>, jobs: readonly Named[] = []): string[][] {
  const always = [['jobs'], ['incidents'], ['incident'], ['fleets'], ['nodes'], ['drills'], ['events', '', '']]
  const named = jobs.filter((job) => job.TrainingJobName === event.TrainingJobName).map((job) => job.RunId)
  // A page that was opened by RunId has the RunId in the keys of its queries.
  const addresses = event.TrainingJobName ? [event.TrainingJobName, ...named] : []
  const keys = ['job', 'protection', 'checkpoints', 'logs', 'events']
  const ofJob = addresses.flatMap((address) => keys.map((key) => [key, address]))
  return [...always, ...ofJob, ...(event.FleetName ? [['events', '', event.FleetName]] : [])]
}

/**
 * Renews the queries that events change.
 *
 * Keys that are added within `GATHER_MS` are renewed together. A key with a pending request is renewed again after the
 * response.
 */
export class Renewals {
  private readonly due = new Map<string, string[]>()
  private readonly underway = new Set<string>()
  private gathering?: ReturnType<typeof setTimeout>

  constructor(private readonly renew: (queryKey: string[]) => Promise<void>) {}

  add(keys: string[][]): void {
    for (const key of keys) this.due.set(key.join('\n'), key)
    this.gather()
  }

  /** Drop all renewals that have not started. */
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

/** State of the event stream: not connected yet, connected, or interrupted. */
export type Liveness = 'connecting' | 'live' | 'cut'

/** Follow the event stream while a user is signed in and the tab is visible. Return the state of the stream. */
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
        // Renew all queries, because their data may have changed before the stream began.
        void client.invalidateQueries({ predicate: (query) => query.queryKey[0] !== 'session' })
      }
      source.onmessage = (message: MessageEvent<string>) => {
        const jobs = client.getQueryData<TrainingJobSummary[]>(['jobs'])
        if (message.data) renewals.add(renewed(JSON.parse(message.data) as Event, jobs))
      }
      source.onerror = () => {
        set('cut')
        if (source.readyState !== EventSource.CLOSED) return // the browser reconnects by itself
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
