/** Texts in the browser's local storage. All components and tabs that use a key share its text. */
import { useSyncExternalStore } from 'react'

const listeners = new Set<() => void>()

function subscribe(listener: () => void): () => void {
  listeners.add(listener)
  window.addEventListener('storage', listener)
  return () => {
    listeners.delete(listener)
    window.removeEventListener('storage', listener)
  }
}

/** Return the kept text of a key, or '' if nothing is kept, and a function that replaces it. */
export function useKept(key: string): [string, (text: string) => void] {
  const text = useSyncExternalStore(subscribe, () => localStorage.getItem(key) ?? '')
  const keep = (changed: string) => {
    if (changed) localStorage.setItem(key, changed)
    else localStorage.removeItem(key)
    for (const listener of listeners) listener()
  }
  return [text, keep]
}
