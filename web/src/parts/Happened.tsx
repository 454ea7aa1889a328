/** An incident in five answers: what happened, whether it is over, what was lost, why, and what Everstep did. */
import type { Incident } from '../contract'
import { hook, shown, type IncidentFigures } from '../model/figures'
import { sentence, utc } from '../model/format'
import { overWords } from '../model/incident'
import { incidentTitle } from '../model/causes'
import { Ago, NodeLink, ToneIcon, Unbroken, useNow } from './Basics'
import { INCIDENT } from '../words/incident'

interface Props {
  incident: Incident
  figures: IncidentFigures
  /** The fleet of the incident's job, for links to nodes. */
  fleet?: string
  /** What an open recovery waits for. */
  jobReason?: string
}

export function Happened({ incident, figures, fleet, jobReason }: Props) {
  const words = INCIDENT.happened
  const evidence = incident.Evidence ?? []
  const failed = incident.FaultedInstanceIds ?? []
  const now = useNow()
  const over = overWords(incident, now)
  return (
    <dl className="answers">
      <dt>{words.what}</dt>
      <dd>
        <strong>{incidentTitle(incident)}</strong>{' '}
        {/* A script that fails on node after node is not a failure of these nodes. */}
        <NodeList ids={figures.unsavedSteps !== undefined && failed.length > 1 ? [] : failed} fleet={fleet} />
        <div className="dim">
          {utc(incident.FailedAt)}, <Ago at={incident.FailedAt} />
        </div>
      </dd>
      <dt>{words.over}</dt>
      <dd className={`tone-${over.tone}`}>
        <strong className="tone-text">
          <ToneIcon tone={over.tone} /> {over.title}
        </strong>{' '}
        {over.text}
        {jobReason && incident.Wait === undefined && <Sentences texts={[words.now(jobReason)]} />}
      </dd>
      <dt>{words.lost}</dt>
      <dd>
        <Losses figures={figures} hasFailed={incident.Outcome === 'JobFailed'} />
        {incident.ContinuingCost && <Sentences texts={[incident.ContinuingCost]} />}
      </dd>
      <dt>{words.why}</dt>
      <dd>
        <Account texts={incident.Why === undefined ? undefined : [incident.Why]} />
        {evidence.length > 0 && (
          <details>
            <summary className="dim">{words.evidence(evidence.length)}</summary>
            <Sentences texts={evidence} />
          </details>
        )}
      </dd>
      <dt>{words.done(figures.isOpen)}</dt>
      <dd>
        <Account texts={incident.Done} />
      </dd>
    </dl>
  )
}

function Losses({ figures, hasFailed }: { figures: IncidentFigures; hasFailed: boolean }) {
  const words = INCIDENT.happened
  const { unsavedSteps: unsaved, recomputedSteps: recomputed } = figures
  return (
    <>
      <ul className="plain losses">
        {unsaved !== undefined ? (
          <Loss figures={figures} field="unsavedSteps" words={words.unsaved(unsaved)} />
        ) : (
          recomputed !== undefined && (
            <Loss figures={figures} field="recomputedSteps" words={words.recomputed(recomputed)} />
          )
        )}
        <Loss figures={figures} field="totalSeconds" words={words.interrupted(figures.isOpen, hasFailed)} />
        {figures.costUsd !== undefined && (
          <Loss figures={figures} field="costUsd" words={words.costs(figures.isOpen)} />
        )}
      </ul>
      {unsaved === undefined && recomputed === undefined && <p className="dim">{words.unknown}</p>}
    </>
  )
}

/** Sentences that only DescribeIncident returns. A dash stands for them until its answer arrives. */
const Account = ({ texts }: { texts: readonly string[] | undefined }) =>
  texts?.length ? <Sentences texts={texts} /> : <p className="dim">–</p>

const Sentences = ({ texts }: { texts: readonly string[] }) => (
  <>
    {texts.filter(Boolean).map((text) => (
      <p key={text}>
        <Unbroken text={sentence(text)} />
      </p>
    ))}
  </>
)

type LossField = 'unsavedSteps' | 'recomputedSteps' | 'totalSeconds' | 'costUsd'
const Loss = ({ figures, field, words }: { figures: IncidentFigures; field: LossField; words: string }) => (
  <li>
    <strong {...hook(figures, field)}>{shown(figures, field)}</strong> <span className="dim">{words}</span>
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
