import '@mantine/core/styles/Radio.css'
import '@mantine/core/styles/RadioIndicator.css'
import '@mantine/core/styles/RadioCard.css'
import { Button, Radio, TextInput } from '@mantine/core'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'

import { call } from '../api/client'
import type { Node } from '../contract'
import { actionsOf, preselectedVerb, recommendedVerb, type NodeAction, type NodeOperation } from '../model/nodes'
import { DIALOGS } from '../words/dialogs'
import { NODES } from '../words/nodes'
import { Form, Problem, useIsStale } from './Basics'
import { Dialog } from './Dialog'

interface Props {
  node: Node
  /** The action to begin with; otherwise the recommended one. */
  operation?: NodeOperation
  onClose: () => void
}

/** Asks for an action on a node and its reason. The person confirms with the node's id. */
export default function NodeDialog({ node, operation, onClose }: Props) {
  const client = useQueryClient()
  const actions = actionsOf(node)
  const recommended = recommendedVerb(node)
  const wanted = actions.find((action) => action.operation === operation)?.verb
  const [verb, setVerb] = useState(wanted ?? preselectedVerb(node))
  const [reason, setReason] = useState('')
  const [typed, setTyped] = useState('')
  const isStale = useIsStale()
  const action = actions.find((each) => each.verb === verb)
  const words = NODES.dialog
  const advice = words.recommended(node.HoldAdvice?.Description ?? '')
  const request = useMutation({
    mutationFn: ({ operation: chosen, takesReason, terminate }: NodeAction) => {
      const details = {
        ...(takesReason && reason ? { Reason: reason } : {}),
        ...(terminate ? { Terminate: true } : {}),
      }
      return call(chosen, { NodeId: node.NodeId, ...details })
    },
    onSuccess: async () => {
      await client.invalidateQueries()
      onClose()
    },
  })
  const isConfirmed = action !== undefined && typed === node.NodeId
  return (
    <Dialog onClose={onClose} title={words.title(node.NodeId)}>
      <Form className="stack" onSubmit={() => isConfirmed && !request.isPending && request.mutate(action)}>
        <Radio.Group label={words.action} value={action?.verb ?? ''} onChange={setVerb}>
          {actions.map((each) => (
            <Radio
              key={each.verb}
              mt={8}
              value={each.verb}
              label={each.verb}
              description={each.verb === recommended ? `${each.effect} ${advice}` : each.effect}
            />
          ))}
        </Radio.Group>
        {node.TrainingJobName && <p className="dim">{words.job(node.TrainingJobName)}</p>}
        {action?.takesReason && (
          <TextInput
            label={words.reason}
            description={words.reasonText}
            value={reason}
            onChange={(event) => setReason(event.currentTarget.value)}
          />
        )}
        <TextInput
          label={DIALOGS.confirm(node.NodeId)}
          value={typed}
          onChange={(event) => setTyped(event.currentTarget.value)}
          autoComplete="off"
          spellCheck={false}
        />
        {request.error && <Problem error={request.error} title={DIALOGS.failed} />}
        <div className="row end">
          <Button variant="default" onClick={onClose}>
            {DIALOGS.cancel}
          </Button>
          <Button type="submit" color="red" disabled={!isConfirmed || isStale} loading={request.isPending}>
            {action?.verb ?? words.choose}
          </Button>
        </div>
      </Form>
    </Dialog>
  )
}
