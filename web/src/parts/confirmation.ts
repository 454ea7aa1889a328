/** The props that `ConfirmByName` and its dialog share. The dialog loads on demand. */
import type { ReactNode } from 'react'

export interface Confirmation {
  /** The text that a person types to confirm. */
  name: string
  verb: string
  onClose: () => void
  onConfirm: () => Promise<unknown>
  children: ReactNode
}
