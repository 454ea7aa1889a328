/** What a person can do: each step with its urgency, its commands, and a button for its node or its page. */
import { Button } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { Suspense, useState } from 'react'
import { Link } from 'react-router'

import { call } from '../api/client'
import { lazyPart } from '../api/pages'
import { nodesQuery, useRole } from '../api/queries'
import { restOf, urgentFirst, type Step } from '../model/duty'
import { actionsOf } from '../model/nodes'
import { DUTIES, DUTY } from '../words/duty'
import { ActionButton } from './ActionButton'
import { Command, Status, Unbroken } from './Basics'

const NodeDialog = lazyPart(() => import('./NodeDialog'))

interface Props {
  steps: readonly Step[]
  /** The fleet of the nodes that the steps name. */
  fleet?: string
  /** The urgency that the card's title names. A step of another urgency, or an optional step, shows its own urgency. */
  urgency?: Step['urgency'] | 'None'
  /** Whether the steps are alternatives, of which the person picks one. Alternatives show no urgency. */
  isChoice?: boolean
  /** The step whose first sentence the top of the page (its verdict) states already. */
  stated?: Step
}

export function Steps({ steps, fleet, urgency, isChoice = false, stated }: Props) {
  if (!steps.length) return null
  return (
    <ul className="plain actions">
      {urgentFirst(steps).map((step) => (
        <li key={step.text}>
          {!isChoice && step !== stated && (step.urgency !== urgency || urgency === 'Optional') && (
            <Status tone={DUTIES[step.urgency].tone} word={DUTIES[step.urgency].word} />
          )}
          {step.isRecommended && step !== stated && <strong>{DUTY.recommended}</strong>}
          <What step={step} fleet={fleet} isStated={step === stated} />
        </li>
      ))}
    </ul>
  )
}

/** A step's text, button and commands. If the top of the page states the step, only its button is unfolded. */
function What({ step, fleet, isStated }: { step: Step; fleet?: string; isStated: boolean }) {
  const { mayRun } = useRole()
  const { text, commands, nodeId, shrink, link } = step
  const isOfNode = nodeId !== undefined && fleet !== undefined
  const button = isOfNode ? (
    <NodeButton id={nodeId} fleet={fleet} />
  ) : shrink && mayRun ? (
    <Shrink {...shrink} />
  ) : (
    link && (
      <Button component={Link} to={link.to} size="xs" variant="default">
        {link.label}
      </Button>
    )
  )
  const isTextFolded = isStated && Boolean(button)
  const isFolded = isTextFolded || isOfNode
  const shownText = isStated ? restOf(step) : text
  const words = shownText && (
    <p>
      <Unbroken text={shownText} />
    </p>
  )
  const shown = shrink && mayRun ? null : <Commands texts={commands} />
  return (
    <>
      {!isTextFolded && words}
      {!isFolded && shown}
      {button && <div className="row">{button}</div>}
      {isFolded && (
        <details>
          <summary className="dim">{isTextFolded ? DUTY.details : DUTY.commands(commands.length)}</summary>
          {isTextFolded && words}
          {shown}
        </details>
      )}
    </>
  )
}

const Commands = ({ texts }: { texts: readonly string[] }) => texts.map((text) => <Command key={text} text={text} />)

/** Lets a waiting job continue on the nodes that it has. The job can grow again, so the button asks no confirmation. */
const Shrink = ({ runId, nodes }: NonNullable<Step['shrink']>) => (
  <ActionButton
    isPrimary
    action={() => call('UpdateTrainingJob', { TrainingJobName: runId, ElasticConfig: { MinNodeCount: nodes } })}
  >
    {DUTY.shrink(nodes)}
  </ActionButton>
)

/** Opens the dialog of a held node. A role that cannot act on nodes gets a link to the node instead. */
function NodeButton({ id, fleet }: { id: string; fleet: string }) {
  const { isAdmin } = useRole()
  const [isOpen, setOpen] = useState(false)
  const node = useQuery({ ...nodesQuery(fleet), enabled: isAdmin }).data?.find((each) => each.NodeId === id)
  if (node === undefined || !actionsOf(node).length) {
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
      {isOpen && (
        <Suspense fallback={null}>
          <NodeDialog node={node} onClose={() => setOpen(false)} />
        </Suspense>
      )}
    </>
  )
}
