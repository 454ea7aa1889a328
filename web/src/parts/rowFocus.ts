/** The rows of a page that keys move through: rows of tables and of lists that contain a link. */
const ROWS = 'main table.grid tbody tr, main .rows > li'

/** Focus the first link of the next (1) or previous (-1) row. Without a focused row, the first row in view. */
export function moveRowFocus(direction: 1 | -1): void {
  const rows = [...document.querySelectorAll(ROWS)].filter((row) => row.querySelector('a'))
  const current = rows.findIndex((row) => row.contains(document.activeElement))
  const inView = rows.findIndex((row) => row.getBoundingClientRect().top >= 0)
  const next = current < 0 ? Math.max(0, inView) : Math.min(rows.length - 1, Math.max(0, current + direction))
  const link = rows[next]?.querySelector('a')
  link?.focus()
  link?.scrollIntoView({ block: 'nearest' })
}
