import type { ReactNode } from 'react'

import { ActionButton } from './ActionButton'

/** The former name of ActionButton, for pages that still use it. */
export const Doing = ({ does, ...rest }: { does: () => Promise<unknown>; title?: string; children: ReactNode }) => (
  <ActionButton action={does} {...rest} />
)
