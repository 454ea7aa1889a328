import { Modal } from '@mantine/core'
import type { ReactNode } from 'react'

/** A dialog with a heading. Mantine's header would be a second banner of the page, and its cross has no name of its own. */
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ReactNode }) {
  return (
    <Modal opened onClose={onClose} title={title} centered closeButtonProps={{ 'aria-label': 'Close' }} attributes={{ header: { role: 'none' } }}>
      {children}
    </Modal>
  )
}
