import { useCallback, useRef, type ChangeEvent } from 'react'
import { useSearchParams } from 'react-router'

type Changes = Record<string, string>
type AddressField = (key: string) => {
  value: string
  onChange: (event: ChangeEvent<HTMLInputElement | HTMLSelectElement>) => void
}
export type SetAddress = (changes: Changes | ((newest: URLSearchParams) => Changes)) => void

/**
 * Return the query of the page's URL, and a function that changes it. An empty value removes its key.
 *
 * The third result returns the attributes of an input element that shows and changes one key.
 *
 * The URL changes only a moment after a call. The function therefore applies a call to the result of earlier calls,
 * from which changes that depend on it are computed.
 */
export function useAddress(): [URLSearchParams, SetAddress, AddressField] {
  const [search, setSearch] = useSearchParams()
  const newest = useRef(search)
  const seen = useRef(search)
  const pending = useRef<string[]>([])
  if (seen.current !== search) {
    seen.current = search
    // If the URL now contains an earlier change, keep the later changes that it does not contain yet.
    pending.current = pending.current.slice(pending.current.lastIndexOf(search.toString()) + 1 || Infinity)
    if (!pending.current.length) newest.current = search
  }
  const navigate = useRef(setSearch)
  navigate.current = setSearch
  const set = useCallback<SetAddress>((changes) => {
    const next = new URLSearchParams(newest.current)
    const values = typeof changes === 'function' ? changes(newest.current) : changes
    for (const [key, value] of Object.entries(values)) value ? next.set(key, value) : next.delete(key)
    newest.current = next
    pending.current.push(next.toString())
    navigate.current(next, { replace: true, preventScrollReset: true })
  }, [])
  const field = (key: string) => ({
    value: search.get(key) ?? '',
    onChange: (event: ChangeEvent<HTMLInputElement | HTMLSelectElement>) => set({ [key]: event.currentTarget.value }),
  })
  return [search, set, field]
}

/** Return the list without an item that it has, or with one that it lacks. */
export const toggled = <T>(items: readonly T[], item: T): T[] =>
  items.includes(item) ? items.filter((other) => other !== item) : [...items, item]
