/** Which rows of a long table are in view. Rows have one height, so that a table of 1,000 rows renders about 40. */
import { useLayoutEffect, useState, type RefObject } from 'react'

export interface Range {
  first: number
  /** The row after the last one. */
  end: number
}

/** Rows are rendered in blocks of this many, so that a scroll by a few rows renders nothing. */
const BLOCK = 10

/** Return the rows to render: those in view and at least one block around them. */
export function rangeInView(top: number, viewHeight: number, rowHeight: number, count: number): Range {
  const first = Math.floor(Math.max(0, -top) / rowHeight / BLOCK) * BLOCK - BLOCK
  const end = Math.ceil(Math.max(0, viewHeight - top) / rowHeight / BLOCK) * BLOCK + BLOCK
  const last = Math.min(count, Math.max(end, 2 * BLOCK))
  return { first: Math.max(0, Math.min(first, last - BLOCK)), end: last }
}

/** `rows`: the element that contains all rows. `rowHeight`: in pixels. */
export function useVisibleRows(rows: RefObject<HTMLElement | null>, rowHeight: number, count: number): Range {
  const [range, setRange] = useState<Range>(() => rangeInView(0, window.innerHeight, rowHeight, count))
  useLayoutEffect(() => {
    const update = () => {
      const top = rows.current?.getBoundingClientRect().top ?? 0
      const next = rangeInView(top, window.innerHeight, rowHeight, count)
      setRange((before) => (before.first === next.first && before.end === next.end ? before : next))
    }
    update()
    window.addEventListener('scroll', update, { capture: true, passive: true }) // the page, or a box around the table
    window.addEventListener('resize', update)
    return () => {
      window.removeEventListener('scroll', update, { capture: true })
      window.removeEventListener('resize', update)
    }
  }, [rows, rowHeight, count])
  return range
}
