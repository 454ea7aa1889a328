import { Button } from '@mantine/core'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import type { ReactNode } from 'react'

import type { Operation } from '../api/client'
import { useRole } from '../api/queries'
import { Problem, useIsStale } from './Basics'

interface Props {
  /** The operation of the request. A role that may not call it gets no button. */
  operation: Operation
  /** Sends the request. */
  action: () => Promise<unknown>
  title?: string
  /** Name of the button for screen readers, where several buttons have the same text. It begins with that text. */
  label?: string
  isPrimary?: boolean
  children: ReactNode
}

/**
 * A button that sends one request at once, shows the error if the server rejects it, and renews all queries.
 *
 * It is off while the page shows old answers. It serves actions that can be undone. Other actions ask for a name first
 * (`ConfirmButton`).
 */
export function ActionButton({ operation, action, title, label, isPrimary = false, children }: Props) {
  const client = useQueryClient()
  const request = useMutation({ mutationFn: action, onSuccess: () => client.invalidateQueries() })
  const { may } = useRole()
  const isStale = useIsStale()
  if (!may(operation)) return null
  return (
    <>
      <Button
        size="xs"
        variant={isPrimary ? 'filled' : 'default'}
        loading={request.isPending}
        disabled={isStale}
        onClick={() => request.mutate()}
        title={title}
        aria-label={label}
      >
        {children}
      </Button>
      {request.error && <Problem error={request.error} title="It was not done" />}
    </>
  )
}
