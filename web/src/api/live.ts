/**
 * Events as they happen (server-sent events): each one renews what it is about, at once. What no event tells, how far training is, is still asked for.
 *
 * The browser connects again by itself and says the last id that it has read, so that nothing is missed; while it is cut off, everything is asked for
 * as often as without a stream. A hidden tab holds no stream: once it is seen again, everything is asked for.
 */
import type { QueryClient } from '@tanstack/react-query'
import { useEffect, useState } from 'react'

import type { Event } from '../contract'
import { whileSeen } from './seen'

const GATHER_MS = 40 // what one decision stores comes as several events: one renewal for all
const AGAIN_MS = 5_000

/** Whether events come right now; asked by what polls. */
export const stream = { isOpen: false }

/** What an event changes, as the beginnings of query keys. */
export function renewed(event: Pick<Event, 'TrainingJobName' | 'FleetName'>): string[][] {
  const always = [['jobs'], ['incidents'], ['incident'], ['fleets'], ['nodes'], ['drills'], ['events', '', '']]
  const ofJob = event.TrainingJobName ? ['job', 'protection', 'checkpoints', 'logs'].map((key) => [key, event.TrainingJobName!]) : []
  return [...always, ...ofJob, ...(event.TrainingJobName ? [['events', event.TrainingJobName]] : []), ...(event.FleetName ? [['events', '', event.FleetName]] : [])]
}

/** Follow events for as long as the page is open and seen. Returns false while they do not come. */
export function useLive(client: QueryClient, isSignedIn: boolean): boolean {
  const [isOpen, setOpen] = useState(false)
  useEffect(() => {
    if (!isSignedIn) return
    let source: EventSource
    let again: ReturnType<typeof setTimeout> | undefined
    let gathering: ReturnType<typeof setTimeout> | undefined
    const due = new Map<string, string[]>()
    const set = (to: boolean) => {
      stream.isOpen = to
      setOpen(to)
    }
    const connect = () => {
      source = new EventSource('/v1/events/stream')
      source.onopen = () => {
        set(true)
        void client.invalidateQueries({ predicate: (query) => query.queryKey[0] !== 'session' }) // what happened before the stream began
      }
      source.onmessage = (message: MessageEvent<string>) => {
        if (!message.data) return
        for (const key of renewed(JSON.parse(message.data) as Event)) due.set(key.join('\n'), key)
        gathering ??= setTimeout(() => {
          gathering = undefined
          const keys = [...due.values()]
          due.clear()
          for (const queryKey of keys) void client.invalidateQueries({ queryKey })
        }, GATHER_MS)
      }
      source.onerror = () => {
        set(false)
        if (source.readyState !== EventSource.CLOSED) return // the browser tries again
        void client.invalidateQueries({ queryKey: ['session'] })
        again = setTimeout(connect, AGAIN_MS)
      }
      source.addEventListener('end', () => void client.invalidateQueries({ queryKey: ['session'] }))
    }
    return whileSeen(connect, () => {
      clearTimeout(again)
      clearTimeout(gathering)
      gathering = undefined
      due.clear()
      source.close()
      set(false)
    })
  }, [client, isSignedIn])
  return isOpen
}
