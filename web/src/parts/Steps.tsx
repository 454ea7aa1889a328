/** What a person can do: each action with its urgency, its commands, and a button for its node or its page. */
import { Button } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { Link } from 'react-router'

import { call } from '../api/client'
import { lazyWith } from '../api/pages'
import { nodesQuery, useRole } from '../api/queries'
import type { Duty, DutyAction } from '../contract'
import { actionsOf } from '../model/nodes'
import { DUTIES, DUTY } from '../words/duty'
import { ActionButton } from './ActionButton'
import { Command, Status, Unbroken } from './Basics'

const NodeDialog = lazyWith(() => import('./NodeDialog'))

interface Props {
  actions: readonly DutyAction[]
  /** RunId of the job of the actions. */
  runId?: string
  /** The fleet of the nodes that the actions name. */
  fleet?: string
  /** Path of the form that submits a failed job again. */
  again?: string
  /** The urgency that the card's title names. An action of another urgency shows its own. */
  urgency?: Duty['Urgency']
  /** Whether the actions are alternatives, of which the person picks one. Alternatives show no urgency. */
  isChoice?: boolean
}

export function Steps({ actions, urgency, isChoice = false, ...context }: Props) {
  if (!actions.length) return null
  return (
    <ul className="plain actions">
      {actions.map((action) => (
        <li key={action.Description}>
          {!isChoice && action.Urgency !== urgency && (
            <Status tone={DUTIES[action.Urgency].tone} word={DUTIES[action.Urgency].title} />
          )}
          {action.IsRecommended && <strong>{DUTY.recommended}</strong>}
          <p>
            <Unbroken text={action.Description} />
          </p>
          <What action={action} {...context} />
        </li>
      ))}
    </ul>
  )
}

/** An action's button and commands. The commands are folded behind a button. */
function What({ action, runId, fleet, again }: { action: DutyAction } & Pick<Props, 'runId' | 'fleet' | 'again'>) {
  const { may } = useRole()
  const { InstanceId: node, MinNodeCount: least } = action
  const texts = [action.Command, ...action.FurtherCommands].filter(Boolean)
  const commands = texts.map((text) => <Command key={text} text={text} />)
  const button =
    node !== undefined && fleet !== undefined ? (
      <NodeButton id={node} fleet={fleet} />
    ) : again && action.Kind === 'SubmitAgain' && may('CreateTrainingJob') ? (
      <Button component={Link} to={again} size="xs" variant="default">
        {DUTY.resubmit}
      </Button>
    ) : undefined
  if (button !== undefined || node !== undefined) {
    return (
      <>
        {button && <div className="row">{button}</div>}
        <details>
          <summary className="dim">{DUTY.commands(texts.length)}</summary>
          {commands}
        </details>
      </>
    )
  }
  if (least !== undefined && runId !== undefined && may('UpdateTrainingJob')) {
    return <Shrink runId={runId} nodes={least} />
  }
  return commands
}

/** Lets a waiting job continue on the nodes that it has. The job can grow again, so the button asks no confirmation. */
const Shrink = ({ runId, nodes }: { runId: string; nodes: number }) => (
  <ActionButton
    operation="UpdateTrainingJob"
    isPrimary
    action={() => call('UpdateTrainingJob', { TrainingJobName: runId, ElasticConfig: { MinNodeCount: nodes } })}
  >
    {DUTY.shrink(nodes)}
  </ActionButton>
)

/** Opens the dialog of a held node. A role that cannot act on nodes gets a link to the node instead. */
function NodeButton({ id, fleet }: { id: string; fleet: string }) {
  const mayDecide = useRole().may('ReleaseNode')
  const [isOpen, setOpen] = useState(false)
  // Another part of the page may have requested the nodes, so check the role and not only whether they are known.
  const node = useQuery({ ...nodesQuery(fleet), enabled: mayDecide }).data?.find((each) => each.NodeId === id)
  if (!mayDecide || node === undefined || !actionsOf(node).length) {
    return (
      <Link className="link" to={`/fleets/${encodeURIComponent(fleet)}#${id}`}>
        {DUTY.showNode}
      </Link>
    )
  }
  return (
    <>
      <Button size="xs" variant="default" onClick={() => setOpen(true)}>
        {DUTY.decide[node.HoldAdvice?.Decision ?? 'Inspect']}
      </Button>
      {isOpen && <NodeDialog node={node} onClose={() => setOpen(false)} />}
    </>
  )
}
