import '@mantine/core/styles/Menu.css'
import { Menu } from '@mantine/core'
import type { ReactElement } from 'react'

import { COLUMNS, DEFAULT_COLUMNS, type Column } from '../model/jobs'
import { JOBS } from '../words/jobs'
import { toggled } from './address'

interface Props {
  columns: readonly Column[]
  /** Changes the columns. `change` takes the newest ones: a second click can come before the first one is shown. */
  onChange: (change: (newest: readonly Column[]) => readonly Column[]) => void
  onClose: () => void
  children: ReactElement
}

/** Chooses the columns of the list of jobs. The name is always a column. */
export default function ColumnsMenu({ columns, onChange, onClose, children }: Props) {
  return (
    <Menu opened position="bottom-end" withinPortal closeOnItemClick={false} onClose={onClose}>
      <Menu.Target>{children}</Menu.Target>
      <Menu.Dropdown>
        {COLUMNS.filter((column) => column !== 'name').map((column) => (
          <Menu.CheckboxItem
            key={column}
            checked={columns.includes(column)}
            onChange={() => onChange((newest) => toggled(newest, column))}
          >
            {JOBS.columns[column].label}
          </Menu.CheckboxItem>
        ))}
        <Menu.Divider />
        <Menu.Item onClick={() => onChange(() => DEFAULT_COLUMNS)}>{JOBS.menus.defaultColumns}</Menu.Item>
      </Menu.Dropdown>
    </Menu>
  )
}
