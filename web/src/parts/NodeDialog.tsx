import '@mantine/core/styles/Radio.css'
import '@mantine/core/styles/RadioIndicator.css'
import '@mantine/core/styles/RadioCard.css'
import { Radio, TextInput } from '@mantine/core'
import { useState } from 'react'

import { call } from '../api/client'
import type { Node } from '../contract'
import { actionsOf, preselectedVerb, recommendedVerb, type NodeAction, type NodeOperation } from '../model/nodes'
import { NODES } from '../words/nodes'
import ConfirmDialog from './ConfirmDialog'

interface Props {
  node: Node
  /** The action to begin with; otherwise the recommended one. */
  operation?: NodeOperation
  onClose: () => void
}

/** Asks for an action on a node and its reason. The person confirms with the node's id. */
export default function NodeDialog({ node, operation, onClose }: Props) {
  const actions = actionsOf(node)
  const recommended = recommendedVerb(node)
  const wanted = actions.find((action) => action.operation === operation)?.verb
  const [verb, setVerb] = useState(wanted ?? preselectedVerb(node))
  const [reason, setReason] = useState('')
  const action = actions.find((each) => each.verb === verb)
  const words = NODES.dialog
  const advice = words.recommended(node.HoldAdvice?.Description ?? '')
  const request = ({ operation: chosen, takesReason, terminate }: NodeAction) => {
    const details = {
      ...(takesReason && reason ? { Reason: reason } : {}),
      ...(terminate ? { Terminate: true } : {}),
    }
    return call(chosen, { NodeId: node.NodeId, ...details })
  }
  return (
    <ConfirmDialog
      name={node.NodeId}
      title={words.title(node.NodeId)}
      verb={action?.verb ?? words.choose}
      isReady={action !== undefined}
      onClose={onClose}
      onConfirm={() => request(action!)}
    >
      <div className="stack">
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
      </div>
    </ConfirmDialog>
  )
}
