/** Finds the rows of a long table that are in view. All rows have one height. Of 1,000 rows, about 40 are rendered. */
import { useLayoutEffect, useState, type RefObject } from 'react'

export interface Range {
  first: number
  /** Index of the row after the last row to render. */
  end: number
}

/** Number of rows in a block. Whole blocks are rendered, so that a scroll by a few rows renders no new rows. */
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
