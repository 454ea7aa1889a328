/** An id with a button that copies it. Only in a table's cell of the class `reason` may the id wrap. */
import { CopyButton } from '@mantine/core'
import type { ReactNode } from 'react'

import { Icon } from './Basics'

const COPY = 'M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z'
const COPIED = 'M3 8.5l3.2 3.2L13 4.8'

/** `children` replaces the id as the visible text, for example a link. */
export function CopyId({ id, children }: { id: string; children?: ReactNode }) {
  return (
    <span className="nowrap">
      <span className="id">{children ?? id}</span>
      <CopyButton value={id}>
        {({ copied, copy }) => (
          <button
            type="button"
            className="copy"
            onClick={copy}
            aria-label={copied ? `Copied ${id}` : `Copy ${id}`}
            title="Copy"
          >
            <Icon size={14} path={copied ? COPIED : COPY} />
          </button>
        )}
      </CopyButton>
    </span>
  )
}
