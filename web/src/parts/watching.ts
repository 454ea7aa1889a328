/** The browser's stored choice of watched jobs: their RunIds, and whether the browser shows notifications. */
import { useSyncExternalStore } from 'react'

export interface Watching {
  isOn: boolean
  runIds: ReadonlySet<string>
}

const KEY = 'everstep-watching'
/** Maximum number of stored RunIds. The RunIds that were added first are dropped first. */
const MOST = 100

function load(): Watching {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY) ?? '{}') as { isOn?: unknown; runIds?: unknown }
    const runIds = Array.isArray(stored.runIds) ? (stored.runIds as unknown[]) : []
    return { isOn: stored.isOn === true, runIds: new Set(runIds.filter((each) => typeof each === 'string')) }
  } catch {
    return { isOn: false, runIds: new Set() }
  }
}

let current = load()
const listeners = new Set<() => void>()

export function setWatching(changes: Partial<Watching>): void {
  current = { ...current, ...changes }
  const runIds = [...current.runIds].slice(-MOST)
  try {
    localStorage.setItem(KEY, JSON.stringify({ isOn: current.isOn, runIds }))
  } catch {
    // A browser without storage forgets the choice when the tab closes.
  }
  for (const listener of listeners) listener()
}

export function toggleWatched(runId: string): void {
  const runIds = new Set(current.runIds)
  if (!runIds.delete(runId)) runIds.add(runId)
  setWatching({ runIds })
}

const subscribe = (listener: () => void) => {
  const changed = (event: StorageEvent) => {
    if (event.key !== KEY) return
    current = load()
    listener()
  }
  listeners.add(listener)
  window.addEventListener('storage', changed) // another tab has changed the choice
  return () => {
    listeners.delete(listener)
    window.removeEventListener('storage', changed)
  }
}

/** Whether this browser may show notifications and at least one job is watched. */
export const isNotifying = ({ isOn, runIds }: Watching): boolean =>
  isOn && runIds.size > 0 && typeof Notification !== 'undefined' && Notification.permission === 'granted'

export const useWatching = (): Watching => useSyncExternalStore(subscribe, () => current)
