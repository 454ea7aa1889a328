import { Suspense } from 'react'
import { lazyPart } from '../api/pages'
import type { Confirmation } from './confirmation'

const Dialog = lazyPart(() => import('./ConfirmDialog'))

/** Asks a person to type the name of the object before an action that cannot be undone. */
export function ConfirmByName({ opened, ...confirmation }: Confirmation & { opened: boolean }) {
  return opened ? (
    <Suspense fallback={null}>
      <Dialog {...confirmation} />
    </Suspense>
  ) : null
}
