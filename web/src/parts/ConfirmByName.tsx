import { Suspense } from 'react'
import { part } from '../api/pages'
import type { Confirmation } from './confirmation'

const Dialog = part(() => import('./ConfirmDialog'))

/** Asks for the name of what is about to be ended. */
export function ConfirmByName({ opened, ...confirmation }: Confirmation & { opened: boolean }) {
  return opened ? (
    <Suspense fallback={null}>
      <Dialog {...confirmation} />
    </Suspense>
  ) : null
}
