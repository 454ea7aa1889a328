import { Button, TextInput } from '@mantine/core'
import { useState } from 'react'

import { DIALOGS } from '../words/dialogs'
import { Problem, useIsStale } from './Basics'
import { Dialog } from './Dialog'
import type { Confirmation } from './confirmation'

/** The dialog of `ConfirmByName`, in a file of its own because most visits need no dialog. */
export default function ConfirmDialog({ name, verb, onClose, onConfirm, children }: Confirmation) {
  const [typed, setTyped] = useState('')
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  const isStale = useIsStale()
  return (
    <Dialog onClose={onClose} title={DIALOGS.question(verb, name)}>
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
        <TextInput
          label={DIALOGS.confirm(name)}
          value={typed}
          onChange={(event) => setTyped(event.currentTarget.value)}
          data-autofocus
          autoComplete="off"
          spellCheck={false}
        />
        {error !== undefined && <Problem error={error} title={DIALOGS.failed} />}
        <div className="row end">
          <Button variant="default" onClick={onClose}>
            {DIALOGS.cancel}
          </Button>
          <Button type="submit" color="red" disabled={typed !== name || isStale} loading={isBusy}>
            {verb}
          </Button>
        </div>
      </form>
    </Dialog>
  )
}
