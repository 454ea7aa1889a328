/** An incident in five answers: what happened, whether it is over, what was lost, why, and what Everstep did. */
import type { Incident } from '../contract'
import { hook, shown, type IncidentFigures } from '../model/figures'
import { count, headline, sentence, utc } from '../model/format'
import { overWords } from '../model/incident'
import { causeTitle, sourceWords } from '../model/causes'
import { Ago, NodeLink, ToneIcon, Unbroken, useNow } from './Basics'
import { INCIDENT } from '../words/incident'

const SHOWN_EVIDENCE = 3

interface Props {
  incident: Incident
  figures: IncidentFigures
  /** The fleet of the incident's job, for links to nodes. */
  fleet?: string
  /** What an open recovery waits for. */
  jobReason?: string
  /** Why the job failed, if it failed with this incident. Its last line is the exception of the script. */
  failure?: string
}

export function Happened({ incident, figures, fleet, jobReason, failure }: Props) {
  const words = INCIDENT.happened
  const evidence = incident.Evidence ?? []
  const replacements = incident.ReplacementInstanceIds ?? []
  const source = sourceWords(incident.RestoreSource)
  const now = useNow()
  const over = overWords(incident, now)
  return (
    <dl className="answers">
      <dt>{words.what}</dt>
      <dd>
        <strong>{causeTitle(incident.Cause)}</strong>{' '}
        <NodeList ids={incident.FaultedInstanceIds ?? []} fleet={fleet} />
        <div className="dim">
          {utc(incident.FailedAt)}, <Ago at={incident.FailedAt} />
        </div>
        {failure && <Sentences texts={[headline(failure)]} />}
      </dd>
      <dt>{words.over}</dt>
      <dd className={`tone-${over.tone}`}>
        <strong className="tone-text">
          <ToneIcon tone={over.tone} /> {over.title}
        </strong>{' '}
        {over.text}
        {jobReason && <Sentences texts={[words.now(jobReason)]} />}
      </dd>
      <dt>{words.lost}</dt>
      <dd><Losses figures={figures} /></dd>
      <dt>{words.why}</dt>
      <dd>
        {evidence.length === 0 && <p className="dim">{words.noEvidence}</p>}
        <Sentences texts={evidence.slice(0, SHOWN_EVIDENCE)} />
        {evidence.length > SHOWN_EVIDENCE && (
          <details>
            <summary>{words.more(evidence.length - SHOWN_EVIDENCE)}</summary>
            <Sentences texts={evidence.slice(SHOWN_EVIDENCE)} />
          </details>
        )}
      </dd>
      <dt>{words.done(figures.isOpen)}</dt>
      <dd>
        <Sentences texts={[incident.Decision]} />
        {replacements.length > 0 && (
          <p>
            {incident.InstanceIds?.length ? words.replacedBy : words.tried}{' '}
            <NodeList ids={replacements} fleet={fleet} />
          </p>
        )}
        {figures.resumedStep !== undefined && source && !failure && (
          <p>{words.resumed(count(figures.resumedStep), source)}</p>
        )}
      </dd>
    </dl>
  )
}

function Losses({ figures }: { figures: IncidentFigures }) {
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
        <Loss figures={figures} field="totalSeconds" words={words.interrupted(figures.isOpen)} />
        {figures.costUsd !== undefined && <Loss figures={figures} field="costUsd" words={words.costs} />}
      </ul>
      {unsaved === undefined && recomputed === undefined && <p className="dim">{words.unknown}</p>}
    </>
  )
}

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
