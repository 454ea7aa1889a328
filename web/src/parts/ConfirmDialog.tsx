import { Button, TextInput } from '@mantine/core'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { useState, type ReactNode } from 'react'

import { DIALOGS } from '../words/dialogs'
import { Form, Problem, useIsStale } from './Basics'
import { Dialog } from './Dialog'

export interface Confirmation {
  /** The text that a person types to confirm. */
  name: string
  verb: string
  /** The default is a question with verb and name. Another title means that other fields come first. */
  title?: string
  /** Whether the other fields permit the request. */
  isReady?: boolean
  onClose: () => void
  /** Sends the request. After it, all queries are renewed. */
  onConfirm: () => Promise<unknown>
  children: ReactNode
}

/** The dialog of `ConfirmButton`, in a file of its own because most visits need no dialog. */
export default function ConfirmDialog({ name, verb, title, isReady = true, ...rest }: Confirmation) {
  const { onClose, onConfirm, children } = rest
  const [typed, setTyped] = useState('')
  const client = useQueryClient()
  const request = useMutation({
    mutationFn: onConfirm,
    onSuccess: () => {
      void client.invalidateQueries()
      onClose()
    },
  })
  const isStale = useIsStale()
  const isConfirmed = isReady && typed === name
  return (
    <Dialog onClose={onClose} title={title ?? DIALOGS.question(verb, name)}>
      <Form className="stack" onSubmit={() => isConfirmed && !request.isPending && request.mutate()}>
        <div>{children}</div>
        <TextInput
          label={DIALOGS.confirm(name)}
          value={typed}
          onChange={(event) => setTyped(event.currentTarget.value)}
          data-autofocus={title === undefined || undefined}
          autoComplete="off"
          spellCheck={false}
        />
        {request.error && <Problem error={request.error} title={DIALOGS.failed} />}
        <div className="row end">
          <Button variant="default" onClick={onClose}>
            {DIALOGS.cancel}
          </Button>
          <Button type="submit" color="red" disabled={!isConfirmed || isStale} loading={request.isPending}>
            {verb}
          </Button>
        </div>
      </Form>
    </Dialog>
  )
}
