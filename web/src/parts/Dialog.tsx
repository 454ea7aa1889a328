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

/** A dialog with its own heading. Mantine's would be a second banner for screen readers, with a nameless button. */
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
