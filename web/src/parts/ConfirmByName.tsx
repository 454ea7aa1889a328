import { Button, Modal, TextInput } from '@mantine/core'
import { useState, type ReactNode } from 'react'

import { Problem } from './Basics'

/** Asks for the name of what is about to be ended. */
export function ConfirmByName({ name, verb, opened, onClose, onConfirm, children }: { name: string; verb: string; opened: boolean; onClose: () => void; onConfirm: () => Promise<unknown>; children: ReactNode }) {
  const [typed, setTyped] = useState('')
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  const close = () => {
    setTyped('')
    setError(undefined)
    onClose()
  }
  return (
    <Modal opened={opened} onClose={close} title={`${verb} ${name}?`} centered>
      <form
        className="stack"
        onSubmit={(event) => {
          event.preventDefault()
          if (typed !== name || isBusy) return
          setBusy(true)
          onConfirm()
            .then(close, setError)
            .finally(() => setBusy(false))
        }}
      >
        <div>{children}</div>
        <TextInput label={<>Type the name to go on: {name}</>} value={typed} onChange={(event) => setTyped(event.currentTarget.value)} data-autofocus autoComplete="off" spellCheck={false} />
        {error !== undefined && <Problem error={error} title="It was not done" />}
        <div className="row end">
          <Button variant="default" onClick={close}>
            Cancel
          </Button>
          <Button type="submit" color="red" disabled={typed !== name} loading={isBusy}>
            {verb}
          </Button>
        </div>
      </form>
    </Modal>
  )
}
