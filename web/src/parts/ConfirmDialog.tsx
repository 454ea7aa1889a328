import { Button, TextInput } from '@mantine/core'
import { useState } from 'react'

import { Problem } from './Basics'
import { Dialog } from './Dialog'
import type { Confirmation } from './confirmation'

/** The dialog of `ConfirmByName`: apart, because a page that is only read never needs it. */
export default function ConfirmDialog({ name, verb, onClose, onConfirm, children }: Confirmation) {
  const [typed, setTyped] = useState('')
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  return (
    <Dialog onClose={onClose} title={`${verb} ${name}?`}>
      <form
        className="stack"
        onSubmit={(event) => {
          event.preventDefault()
          if (typed !== name || isBusy) return
          setBusy(true)
          onConfirm()
            .then(onClose, setError)
            .finally(() => setBusy(false))
        }}
      >
        <div>{children}</div>
        <TextInput label={<>Type the name to go on: {name}</>} value={typed} onChange={(event) => setTyped(event.currentTarget.value)} data-autofocus autoComplete="off" spellCheck={false} />
        {error !== undefined && <Problem error={error} title="It was not done" />}
        <div className="row end">
          <Button variant="default" onClick={onClose}>
            Cancel
          </Button>
          <Button type="submit" color="red" disabled={typed !== name} loading={isBusy}>
            {verb}
          </Button>
        </div>
      </form>
    </Dialog>
  )
}
