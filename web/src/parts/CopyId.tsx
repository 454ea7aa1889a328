/** An id with a button that copies it. Only in a table's cell of the class `reason` may the id wrap. */
import { CopyButton } from '@mantine/core'
import type { ReactNode } from 'react'

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
            <svg
              width="14"
              height="14"
              viewBox="0 0 16 16"
              fill="none"
              stroke="currentColor"
              strokeWidth="1.5"
              aria-hidden="true"
            >
              {copied ? <path d="M3 8.5l3.2 3.2L13 4.8" /> : <path d="M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z" />}
            </svg>
          </button>
        )}
      </CopyButton>
    </span>
  )
}
