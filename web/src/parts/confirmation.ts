/** What both halves of a confirmation by name need: `ConfirmByName` and its dialog, which loads on demand. */
import type { ReactNode } from 'react'

export interface Confirmation {
  /** What has to be typed. */
  name: string
  verb: string
  onClose: () => void
  onConfirm: () => Promise<unknown>
  children: ReactNode
}
