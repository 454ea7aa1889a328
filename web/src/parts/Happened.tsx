/** Answers about an incident: what failed, why, what Everstep did, what happens now, and what was lost. */
import type { ReactNode } from 'react'

import type { Incident } from '../contract'
import { hook, shown, type IncidentFigures } from '../model/figures'
import { clock, sentence, utc } from '../model/format'
import { presentWords } from '../model/incident'
import { Ago, NodeLink, Unbroken, useNow } from './Basics'
import { INCIDENT } from '../words/incident'

interface Props {
  incident: Incident
  figures: IncidentFigures
  /** The fleet of the incident's job, for links to nodes. */
  fleet?: string
  /** Whether the page's own title says what failed. */
  isTitled?: boolean
  /** The job's Reason, which states what an open recovery waits for. */
  jobReason?: string
}

export function Happened({ incident, figures, fleet, isTitled = false, jobReason }: Props) {
  const words = INCIDENT.happened
  const [done, ...explained] = incident.Done ?? []
  const unsaved = figures.unsavedSteps ? [words.unsavedReason(figures.keptStep ?? 0)] : []
  const details = [...unsaved, ...explained, ...(incident.Evidence ?? [])]
  const title = incident.Headline
  // If the script failed, name no nodes, because the nodes on which it ran did not fail.
  const isOfScript = incident.Outcome === 'JobFailed' && incident.Cause === 'rank_exit'
  const failed = isOfScript ? [] : (incident.FaultedInstanceIds ?? [])
  const now = useNow()
  const present = presentWords(incident, now)
  const when = (
    <span className="dim" title={utc(incident.FailedAt)}>
      {now - incident.FailedAt < DAY_SECONDS ? `${clock(incident.FailedAt)} UTC` : utc(incident.FailedAt)},{' '}
      <Ago at={incident.FailedAt} />
    </span>
  )
  const folded = details.length > 0 && (
    <details>
      <summary className="dim">{words.details(details.length)}</summary>
      <Sentences texts={details} />
    </details>
  )
  return (
    <dl className="answers">
      {!isTitled && (
        <>
          <dt>{words.what}</dt>
          <dd>
            <strong>
              <Unbroken text={title} />
            </strong>{' '}
            <NodeList ids={failed} fleet={fleet} />
            {failed.length > 0 && ' at '}
            {when}
          </dd>
        </>
      )}
      <dt>{words.why}</dt>
      <dd>
        <Account text={incident.Why} />
      </dd>
      <dt>{words.done}</dt>
      <dd>
        <Account text={done} />
      </dd>
      {present && (
        <>
          <dt>{words.now}</dt>
          <dd>
            <strong>
              <Unbroken text={present} />
            </strong>
            {jobReason && <Sentences texts={[jobReason]} />}
          </dd>
        </>
      )}
      <dt>{words.lost(figures.isOpen)}</dt>
      <dd>
        <Losses figures={figures} outcome={incident.Outcome} />
        {!isTitled && <ContinuingCost incident={incident} />}
        {!isTitled && folded}
      </dd>
      {isTitled && (
        <>
          <dt>{words.when}</dt>
          <dd>
            {when}
            {folded}
          </dd>
        </>
      )}
    </dl>
  )
}

/** The costs that continue from now on. */
export const ContinuingCost = ({ incident: { ContinuingCost: text } }: Pick<Props, 'incident'>) =>
  text ? (
    <p className="below">
      <Unbroken text={sentence(text)} />
    </p>
  ) : null

function Losses({ figures, outcome }: { figures: IncidentFigures; outcome: Incident['Outcome'] }) {
  const words = INCIDENT.happened
  const hasEndedJob = outcome === 'JobFailed' || outcome === 'JobStopped'
  const { unsavedSteps: unsaved, recomputedSteps: recomputed } = figures
  return (
    <ul className="plain losses">
      {unsaved !== undefined ? (
        <Loss figures={figures} field="unsavedSteps" words={words.unsaved(unsaved)} />
      ) : hasEndedJob ? (
        // Until the answers about the job and its checkpoints arrive, the number of lost steps is unknown.
        <li>
          <strong>–</strong> <span className="dim">{words.noneLost}</span>
        </li>
      ) : recomputed ? (
        <Loss figures={figures} field="recomputedSteps" words={words.recomputed(recomputed)} />
      ) : (
        (figures.isOpen || recomputed === 0) && (
          <li>
            <strong>0</strong> <span className="dim">{words.noneLost}</span>
          </li>
        )
      )}
      <Loss figures={figures} field="totalSeconds" words={words.downtime}>
        {figures.costUsd !== undefined && (
          <span title={words.costs}>
            (<span {...hook(figures, 'costUsd')}>{shown(figures, 'costUsd')}</span>)
          </span>
        )}
      </Loss>
    </ul>
  )
}

const DAY_SECONDS = 86_400

/** A sentence that only DescribeIncident returns. A dash stands for it until the answer arrives. */
const Account = ({ text }: { text: string | undefined }) =>
  text ? <Sentences texts={[text]} /> : <p className="dim">–</p>

const Sentences = ({ texts }: { texts: readonly string[] }) => (
  <>
    {texts.filter(Boolean).map((text) => (
      <p key={text}>
        <Unbroken text={sentence(text)} />
      </p>
    ))}
  </>
)

type LossField = 'unsavedSteps' | 'recomputedSteps' | 'totalSeconds'
interface LossProps {
  figures: IncidentFigures
  field: LossField
  words: string
  children?: ReactNode
}
const Loss = ({ figures, field, words, children }: LossProps) => (
  <li>
    <strong {...hook(figures, field)}>{shown(figures, field)}</strong> <span className="dim">{words}</span> {children}
  </li>
)

export const NodeList = ({ ids, fleet }: { ids: readonly string[]; fleet?: string }) => (
  <>
    {ids.map((id, index) => (
      <span key={id} className="nowrap">
        {index > 0 && ', '}
        <NodeLink id={id} fleet={fleet} />
      </span>
    ))}
  </>
)
