import '@mantine/core/styles/ModalBase.css'
import '@mantine/core/styles/Modal.css'
import { Modal } from '@mantine/core'
import type { ReactNode } from 'react'

import { DIALOGS } from '../words/dialogs'

interface Props {
  title: string
  onClose: () => void
  children: ReactNode
}

/**
 * Mantine's dialog with two corrections for screen readers.
 *
 * Its <header> does not count as the page's banner (a landmark), and its close button has a name.
 */
export function Dialog({ title, onClose, children }: Props) {
  return (
    <Modal
      opened
      onClose={onClose}
      title={title}
      centered
      closeButtonProps={{ 'aria-label': DIALOGS.close }}
      attributes={{ header: { role: 'none' } }}
    >
      {children}
    </Modal>
  )
}
