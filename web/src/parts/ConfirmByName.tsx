import { Suspense, type ReactNode } from 'react'
import { part } from '../api/pages'

const Dialog = part(() => import('./ConfirmDialog'))

export interface Confirmation {
  /** What has to be typed. */
  name: string
  verb: string
  onClose: () => void
  onConfirm: () => Promise<unknown>
  children: ReactNode
}

/** Asks for the name of what is about to be ended. */
export function ConfirmByName({ opened, ...confirmation }: Confirmation & { opened: boolean }) {
  return opened ? (
    <Suspense fallback={null}>
      <Dialog {...confirmation} />
    </Suspense>
  ) : null
}
