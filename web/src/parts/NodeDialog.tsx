import { Button, Radio, TextInput } from '@mantine/core'
import { useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'

import { call } from '../api/client'
import type { Node } from '../contract'
import { actionsOf, adviceOn } from '../model/nodes'
import { Problem } from './Basics'
import { Dialog } from './Dialog'

/** What a person wants done with a node: what it does, why, and the node's id typed. */
export default function NodeDialog({ node, onClose }: { node: Node; onClose: () => void }) {
  const client = useQueryClient()
  const actions = actionsOf(node)
  const advised = adviceOn(node).verb
  const [verb, setVerb] = useState(actions.length === 1 ? actions[0]!.verb : node.NodeStatus === 'held' ? advised : actions[0]!.verb)
  const [reason, setReason] = useState('')
  const [typed, setTyped] = useState('')
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  const action = actions.find((each) => each.verb === verb)
  return (
    <Dialog onClose={onClose} title={`What is to be done with ${node.NodeId}?`}>
      <form
        className="stack"
        onSubmit={(event) => {
          event.preventDefault()
          if (action === undefined || typed !== node.NodeId || isBusy) return
          setBusy(true)
          setError(undefined)
          call(action.operation, { NodeId: node.NodeId, ...(action.takesReason && reason ? { Reason: reason } : {}), ...(action.terminate ? { Terminate: true } : {}) })
            .then(async () => {
              await client.invalidateQueries()
              onClose()
            }, setError)
            .finally(() => setBusy(false))
        }}
      >
        <Radio.Group label="Action" value={action?.verb ?? ''} onChange={setVerb}>
          {actions.map((each) => (
            <Radio key={each.verb} mt={8} value={each.verb} label={each.verb} description={each.verb === advised ? `${each.does} Recommended: ${node.Reason}` : each.does} />
          ))}
        </Radio.Group>
        {node.TrainingJobName && <p className="dim">It works for {node.TrainingJobName}.</p>}
        {action?.takesReason && <TextInput label="Why" description="Told with the node and in the history" value={reason} onChange={(event) => setReason(event.currentTarget.value)} />}
        <TextInput label={<>Type the name to go on: {node.NodeId}</>} value={typed} onChange={(event) => setTyped(event.currentTarget.value)} autoComplete="off" spellCheck={false} />
        {error !== undefined && <Problem error={error} title="It was not done" />}
        <div className="row end">
          <Button variant="default" onClick={onClose}>
            Cancel
          </Button>
          <Button type="submit" color="red" disabled={action === undefined || typed !== node.NodeId} loading={isBusy}>
            {action?.verb ?? 'Choose an action'}
          </Button>
        </div>
      </form>
    </Dialog>
  )
}
