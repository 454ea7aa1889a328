import { Button } from '@mantine/core'
import { useQueryClient } from '@tanstack/react-query'
import { useState, type ReactNode } from 'react'

import { Problem } from './Basics'

/** A button that does one thing at once, says when the service refuses it, and has everything asked for anew. For what can be undone; the rest asks for a name. */
export function Doing({ does, title, children }: { does: () => Promise<unknown>; title?: string; children: ReactNode }) {
  const client = useQueryClient()
  const [isBusy, setBusy] = useState(false)
  const [error, setError] = useState<unknown>()
  const start = () => {
    setBusy(true)
    setError(undefined)
    does()
      .then(() => client.invalidateQueries(), setError)
      .finally(() => setBusy(false))
  }
  return (
    <>
      <Button size="xs" variant="default" loading={isBusy} onClick={start} title={title}>
        {children}
      </Button>
      {error !== undefined && <Problem error={error} title="It was not done" />}
    </>
  )
}
