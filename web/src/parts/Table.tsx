/** A table whose columns are values. On a phone, a stacked table shows each row as a list of named cells. */
import { Button } from '@mantine/core'
import { useState, type ReactNode } from 'react'

import { hook, shown, type AnyFigures, type Field } from '../model/figures'
import { count } from '../model/format'

/**
 * A heading, the content of a row's cell, the classes of the cell, and further attributes, such as those of `hook`.
 *
 * Class `n`: a number, aligned at the right. `reason`: a long text, which has no name on a phone. `unnamed`: only
 * screen readers read the heading.
 */
export type Column<T> = readonly [
  label: string,
  cell: (row: T) => ReactNode,
  className?: string,
  attributes?: (row: T) => Record<string, string | undefined>,
]

/** Return the column of a figure (model/figures.ts). */
export const figureColumn = <T, F extends AnyFigures>(label: string, of: (row: T) => F, field: Field<F>): Column<T> => [
  label,
  (row) => shown(of(row), field),
  'n',
  (row) => hook(of(row), field),
]

interface Props<T> {
  /** Name of the box around the table, for a box that can have the focus. */
  label?: string
  columns: readonly (Column<T> | false)[]
  rows: readonly T[]
  keyOf: (row: T) => string | number
  /** Attributes of a row's element. */
  rowOf?: (row: T) => Record<string, string | undefined>
  isStacked?: boolean
  /** Number of rows that the table has at first, and that each press of the button below it adds. */
  page?: number
  /** Text of the button: the number of rows that it adds, and of all rows. */
  more?: (added: string, all: string) => string
}

export function Table<T>({ label, columns, rows, keyOf, rowOf, isStacked = true, page = Infinity, more }: Props<T>) {
  const [limit, setLimit] = useState(page)
  const shown = columns.filter((column) => column !== false)
  const has = (classes: string | undefined, name: string) => classes?.split(' ').includes(name)
  return (
    <>
      <div className="scroll" {...(label === undefined ? {} : { tabIndex: 0, role: 'region', 'aria-label': label })}>
        <table className={isStacked ? 'grid stacked' : 'grid'}>
          <thead>
            <tr>
              {shown.map(([name, , classes], index) => (
                <th key={index} className={has(classes, 'n') ? 'n' : undefined}>
                  {has(classes, 'unnamed') ? <span className="visually-hidden">{name}</span> : name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, limit).map((row) => (
              <tr key={keyOf(row)} {...rowOf?.(row)}>
                {shown.map(([name, cell, classes, attributes], index) => (
                  <td
                    key={index}
                    className={classes}
                    data-name={has(classes, 'reason') ? undefined : name}
                    {...attributes?.(row)}
                  >
                    {cell(row)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > limit && (
        <Button className="more" variant="default" size="xs" onClick={() => setLimit(limit + page)}>
          {more?.(count(Math.min(page, rows.length - limit)), count(rows.length))}
        </Button>
      )}
    </>
  )
}
