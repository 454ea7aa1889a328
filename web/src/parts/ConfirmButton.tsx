import { Button, type ButtonProps } from '@mantine/core'
import { useState } from 'react'

import { lazyWith } from '../api/pages'
import type { Confirmation } from './ConfirmDialog'

const Dialog = lazyWith(() => import('./ConfirmDialog'))

interface Props extends Omit<Confirmation, 'onClose'> {
  /** Text of the button; by default, the verb. */
  text?: string
  /** Name of the button for screen readers, where several buttons have the same text. It begins with that text. */
  label?: string
  button?: ButtonProps
}

/** A button for an action that cannot be undone. It asks a person to type the name of the object first. */
export function ConfirmButton({ text, label, button, ...confirmation }: Props) {
  const [isAsking, setAsking] = useState(false)
  return (
    <>
      <Button size="xs" color="red" variant="outline" aria-label={label} onClick={() => setAsking(true)} {...button}>
        {text ?? confirmation.verb}
      </Button>
      {isAsking && <Dialog {...confirmation} onClose={() => setAsking(false)} />}
    </>
  )
}
