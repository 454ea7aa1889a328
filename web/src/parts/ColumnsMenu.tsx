import '@mantine/core/styles/Menu.css'
import { Menu } from '@mantine/core'
import type { ReactElement } from 'react'

import { COLUMNS, DEFAULT_COLUMNS, type Column } from '../model/jobs'
import { JOBS } from '../words/jobs'

interface Props {
  columns: readonly Column[]
  onChange: (columns: readonly Column[]) => void
  onClose: () => void
  children: ReactElement
}

/** Chooses the columns of the list of jobs. The name is always a column. */
export default function ColumnsMenu({ columns, onChange, onClose, children }: Props) {
  const without = (column: Column) => columns.filter((other) => other !== column)
  return (
    <Menu opened position="bottom-end" withinPortal closeOnItemClick={false} onClose={onClose}>
      <Menu.Target>{children}</Menu.Target>
      <Menu.Dropdown>
        {COLUMNS.filter((column) => column !== 'name').map((column) => {
          const isShown = columns.includes(column)
          return (
            <Menu.CheckboxItem
              key={column}
              checked={isShown}
              onChange={() => onChange(isShown ? without(column) : [...columns, column])}
            >
              {JOBS.columns[column].label}
            </Menu.CheckboxItem>
          )
        })}
        <Menu.Divider />
        <Menu.Item onClick={() => onChange(DEFAULT_COLUMNS)}>{JOBS.menus.defaultColumns}</Menu.Item>
      </Menu.Dropdown>
    </Menu>
  )
}
