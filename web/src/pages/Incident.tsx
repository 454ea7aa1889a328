/** One incident: what failed, why, what was done, what was lost, and what to do; then its timeline and figures. */
import { Button } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import { call } from '../api/client'
import {
  eventsAroundQuery, incidentQuery, jobQuery, printedQuery, protectionQuery, similarIncidentsQuery, useRole,
} from '../api/queries'
import type { Incident, SimilarIncident } from '../contract'
import { plain } from '../model/ansi'
import { hook, incidentFigures, phaseHook, shown, type IncidentFigures } from '../model/figures'
import { clock, count, duration, headline, sentence, utc } from '../model/format'
import { hasStacks, momentsOf, type Moment } from '../model/incidentTimeline'
import { inLineOrder } from '../model/printed'
import { isOver } from '../model/verdict'
import { Ago, Command, JobLink, NodeLink, Shown, Status, ToneIcon, Unbroken, useNow } from '../parts/Basics'
import { Card, Figures } from '../parts/Card'
import { CopyId } from '../parts/CopyId'
import { ActionButton } from '../parts/ActionButton'
import { download } from '../parts/download'
import { PhaseBar } from '../parts/IncidentTable'
import { Notes } from '../parts/Notes'
import { Owner } from '../parts/Owner'
import { PageHead, type VerdictLine } from '../parts/PageHead'
import { Stacks } from '../parts/Stacks'
import { CAUSES, SOURCES } from '../words/causes'
import { INCIDENT, NOTES, OUTCOMES, URGENCIES } from '../words/incident'

const AROUND_SECONDS = 30
const SHOWN_EVIDENCE = 3

export default function IncidentPage() {
  const { id = '' } = useParams()
  useDocumentTitle(`Incident ${id}, Everstep`)
  const query = useQuery(incidentQuery(id))
  return <Shown query={query}>{(incident) => <Described incident={incident} />}</Shown>
}

/** What the parts of the page share. */
interface Part {
  incident: Incident
  figures: IncidentFigures
  /** The fleet of the incident's job, for links to nodes. */
  fleet?: string
}

function Described({ incident }: { incident: Incident }) {
  const now = useNow()
  const address = useJobAddresses()(incident)
  const described = useQuery(jobQuery(address)).data
  // Another job may have the name by now.
  const job = described?.RunId === incident.RunId ? described : undefined
  const protection = useQuery({ ...protectionQuery(address), enabled: job !== undefined && isOver(job) }).data
  const figures = incidentFigures(incident, now, job, { protection })
  const part: Part = { incident, figures, fleet: job?.FleetName }
  return (
    <div className="stack">
      <Head {...part} address={address} />
      <div className="incident">
        <div className="stack">
          <Happened
            {...part}
            jobReason={figures.isOpen ? job?.Reason : undefined}
            failure={incident.Outcome === 'JobFailed' ? job?.FailureReason : undefined}
          />
          <Phases {...part} />
        </div>
        <div className="stack">
          <ToDo incident={incident} />
          <Card title={INCIDENT.people.title}>
            <Owner incident={incident} />
            <h3 className="below">{NOTES.title}</h3>
            <Notes
              notes={incident.Notes ?? []}
              create={(Text, ClientRequestToken) =>
                call('CreateIncidentNote', { IncidentId: incident.IncidentId, Text, ClientRequestToken })
              }
            />
          </Card>
        </div>
      </div>
      <Timeline incident={incident} address={address} />
      <Facts {...part} />
      <Similar incident={incident} />
    </div>
  )
}

function Head({ incident, figures, address }: Part & { address: string }) {
  const { mayRun } = useRole()
  const outcome = OUTCOMES[incident.Outcome ?? (figures.isOpen ? 'Open' : 'Recovered')]
  const save = async () => {
    const document = await call('ExportIncident', { IncidentId: incident.IncidentId, Format: 'markdown' })
    download(document.FileName, [document.Content], 'text/markdown')
  }
  return (
    <PageHead
      crumbs={
        <>
          <Link to="/incidents">{INCIDENT.crumb}</Link> /{' '}
          <JobLink name={incident.TrainingJobName} address={address} />
        </>
      }
      title={CAUSES[incident.Cause]}
      status={
        <>
          <Status tone={outcome.tone} word={outcome.word} />
          {figures.isOpen && (
            <span {...hook(figures, 'phase')}>
              <Status tone={figures.phaseTone} word={figures.phase} />
            </span>
          )}
          <span className="dim">
            <CopyId id={incident.IncidentId} />
          </span>
        </>
      }
      actions={
        <>
          {incident.AcknowledgementTime !== undefined ? (
            <span className="dim">
              {INCIDENT.acknowledged} {incident.AcknowledgedBy} <Ago at={incident.AcknowledgementTime} />
            </span>
          ) : (
            mayRun && (
              <ActionButton action={() => call('AcknowledgeIncident', { IncidentId: incident.IncidentId })}>
                {INCIDENT.acknowledge}
              </ActionButton>
            )
          )}
          <ActionButton action={save}>{INCIDENT.export}</ActionButton>
          <Button
            component="a" size="xs" variant="default" target="_blank" rel="noreferrer"
            href={`/runbook.html#${encodeURIComponent(incident.Cause)}`}
          >
            {INCIDENT.runbook}
          </Button>
        </>
      }
      verdict={verdictOf(incident)}
    />
  )
}

/** The lead says whether to act, and the text what happened. */
function verdictOf(incident: Incident): VerdictLine {
  const urgency = incident.Actions?.[0]?.Urgency
  const text = incident.Verdict ?? `${CAUSES[incident.Cause]}.`
  if (urgency === 'Now' || urgency === 'Later') {
    return { tone: URGENCIES[urgency].tone, lead: INCIDENT.lead[urgency], text }
  }
  return { tone: incident.ClosedAt === undefined ? 'busy' : 'good', lead: INCIDENT.lead.none, text }
}

interface HappenedPart extends Part {
  /** What an open recovery waits for. */
  jobReason?: string
  /** Why the job failed, if it failed with this incident. Its last line is the exception of the script. */
  failure?: string
}

function Happened({ incident, figures, fleet, jobReason, failure }: HappenedPart) {
  const words = INCIDENT.happened
  const evidence = incident.Evidence ?? []
  const faulted = incident.FaultedInstanceIds ?? []
  const replacements = incident.ReplacementInstanceIds ?? []
  const source = SOURCES[incident.RestoreSource ?? '']
  return (
    <Card title={words.title}>
      <dl className="answers">
        <dt>{words.what}</dt>
        <dd>
          <strong>{CAUSES[incident.Cause]}</strong> <NodeList ids={faulted} fleet={fleet} />
          <div className="dim">
            {utc(incident.FailedAt)}, <Ago at={incident.FailedAt} />
          </div>
        </dd>
        <dt>{words.why}</dt>
        <dd>
          {failure && <Sentences texts={[headline(failure)]} />}
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
          {jobReason && <Sentences texts={[words.now(jobReason)]} />}
          {replacements.length > 0 && (
            <p>
              {words.replacedBy} <NodeList ids={replacements} fleet={fleet} />
            </p>
          )}
          {figures.resumedStep !== undefined && source && !failure && (
            <p>{words.resumed(count(figures.resumedStep), source)}</p>
          )}
        </dd>
        <dt>{words.lost}</dt>
        <dd>
          <ul className="plain losses">
            {figures.unsavedSteps !== undefined ? (
              <Loss figures={figures} field="unsavedSteps" words={words.unsaved} />
            ) : (
              figures.recomputedSteps !== undefined && (
                <Loss figures={figures} field="recomputedSteps" words={words.recomputed} />
              )
            )}
            <Loss figures={figures} field="totalSeconds" words={words.interrupted(figures.isOpen)} />
            {figures.costUsd !== undefined && <Loss figures={figures} field="costUsd" words={words.costs} />}
          </ul>
          {figures.unsavedSteps === undefined && figures.recomputedSteps === undefined && (
            <p className="dim">{words.unknown}</p>
          )}
        </dd>
      </dl>
    </Card>
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

const NodeList = ({ ids, fleet }: { ids: readonly string[]; fleet?: string }) => (
  <>
    {ids.map((id, index) => (
      <span key={id} className="nowrap">
        {index > 0 && ', '}
        <NodeLink id={id} fleet={fleet} />
      </span>
    ))}
  </>
)

function ToDo({ incident }: { incident: Incident }) {
  const actions = incident.Actions ?? []
  const { title, none } = INCIDENT.todo
  return (
    <Card title={title} label={title}>
      {actions.length === 0 && <p className="dim">{none}</p>}
      <ul className="plain actions">
        {actions.map((each) => (
          <li key={each.Description}>
            <Status tone={URGENCIES[each.Urgency].tone} word={URGENCIES[each.Urgency].word} />
            <p>
              <Unbroken text={each.Description} />
            </p>
            <Command text={each.Command} />
          </li>
        ))}
      </ul>
    </Card>
  )
}

function Phases({ incident, figures }: Part) {
  return (
    <Card title={INCIDENT.phases.title}>
      <PhaseBar incident={incident} height={24} width="100%" />
      <ul className="legend">
        {figures.phases.map(({ phase, seconds, isOpen }) => (
          <li key={phase} {...phaseHook(incident, phase, seconds)}>
            <span className="key" style={{ background: `var(--b-${phase})` }} />
            <span>
              {phase} {isOpen && <span className="dim">{INCIDENT.phases.now}</span>}
            </span>
            <span>{duration(seconds)}</span>
          </li>
        ))}
      </ul>
    </Card>
  )
}

function Timeline({ incident, address }: { incident: Incident; address: string }) {
  const events = useQuery(eventsAroundQuery(incident, AROUND_SECONDS))
  const lines = useQuery(printedQuery(incident)).data
  const words = INCIDENT.timeline
  return (
    <Card
      title={words.title}
      label={words.title}
      actions={
        <Link to={`/jobs/${encodeURIComponent(address)}/logs?failure=${encodeURIComponent(incident.IncidentId)}`}>
          {words.log}
        </Link>
      }
    >
      <Shown query={events} rows={4}>
        {(near) => (
          <ol className="plain moments">
            {momentsOf(incident, near, inLineOrder(lines ?? [])).map((moment) => (
              <Entry key={moment.key} moment={moment} failedAt={incident.FailedAt} />
            ))}
          </ol>
        )}
      </Shown>
      {lines?.length === 0 && <p className="dim">{words.none}</p>}
    </Card>
  )
}

function Entry({ moment, failedAt }: { moment: Moment; failedAt: number }) {
  const { at, title, tone, event, lines, note } = moment
  return (
    <li className={tone && `milestone tone-${tone}`}>
      <time dateTime={new Date(at * 1000).toISOString()} title={utc(at)}>
        {clock(at)}
      </time>
      <span className="dim after">
        {at < failedAt ? '−' : '+'}
        {duration(Math.abs(at - failedAt))}
      </span>
      <div className="what">
        {tone && <ToneIcon tone={tone} />}
        <Unbroken text={title} /> {event && <span className="dim">{event.Type}</span>}
        {note && <p className="text">{note.Text}</p>}
        {lines && (
          <pre className="log wrap" tabIndex={0}>
            {lines
              .map((line) => {
                const who = line.Rank === undefined ? line.NodeId : `rank ${line.Rank}`
                return `${clock(line.Timestamp)} ${who}  ${plain(line.Message)}`
              })
              .join('\n')}
          </pre>
        )}
        {event && hasStacks(event) && <Stacks event={event} />}
      </div>
    </li>
  )
}

function Facts({ incident, figures, fleet }: Part) {
  const words = INCIDENT.facts
  const nodes = (ids: readonly string[] | undefined, none: string = words.none) =>
    ids?.length ? <NodeList ids={ids} fleet={fleet} /> : none
  const sources = (incident.RankSources ?? []).map(({ FirstRank, LastRank, Source }) => {
    const ranks = FirstRank === LastRank ? `rank ${FirstRank}` : `ranks ${FirstRank}–${LastRank}`
    return <div key={FirstRank}>{`${ranks}: ${SOURCES[Source] ?? Source}`}</div>
  })
  const after = incident.GenerationAfter === undefined ? '…' : String(incident.GenerationAfter)
  const size = (nodeCount?: number) => (nodeCount === undefined ? '…' : count(nodeCount))
  const figure = (label: string, field: 'reachedStep' | 'resumedStep' | 'recomputedSteps' | 'unsavedSteps') => ({
    label, value: <span {...hook(figures, field)}>{shown(figures, field)}</span>,
  })
  return (
    <Card title={words.title}>
      <Figures
        figures={[
          { label: words.failed, value: utc(incident.FailedAt) },
          { label: words.detected, value: utc(incident.OpenedAt) },
          { label: words.closed, value: incident.ClosedAt === undefined ? words.open : utc(incident.ClosedAt) },
          figure(words.reached, 'reachedStep'),
          figure(words.resumed, 'resumedStep'),
          figure(words.recomputed, 'recomputedSteps'),
          ...(figures.unsavedSteps === undefined ? [] : [figure(words.unsaved, 'unsavedSteps')]),
          { label: words.launch, value: `${incident.GenerationBefore} → ${after}` },
          { label: words.nodes, value: `${size(incident.NodeCountBefore)} → ${size(incident.NodeCountAfter)}` },
          { label: words.faulted, value: nodes(incident.FaultedInstanceIds, words.noNode) },
          { label: words.lost, value: nodes(incident.InstanceIds) },
          { label: words.replaced, value: nodes(incident.ReplacementInstanceIds) },
          { label: words.sources, value: sources.length ? sources : figures.isOpen ? '–' : words.nowhere },
          {
            label: words.cost,
            value:
              figures.costUsd === undefined ? words.noPrice : (
                <span {...hook(figures, 'costUsd')}>{shown(figures, 'costUsd')}</span>
              ),
          },
          { label: words.project, value: incident.Project },
        ]}
      />
    </Card>
  )
}

function Similar({ incident }: { incident: Incident }) {
  const query = useQuery(similarIncidentsQuery(incident.IncidentId))
  const { title, none } = INCIDENT.similar
  return (
    <Card title={title} isFlush label={title}>
      <Shown query={query} rows={2}>
        {(similar) => (similar.length === 0 ? <p className="dim empty">{none}</p> : <SimilarTable similar={similar} />)}
      </Shown>
    </Card>
  )
}

function SimilarTable({ similar }: { similar: readonly SimilarIncident[] }) {
  const { columns, shares } = INCIDENT.similar
  const addressOf = useJobAddresses()
  return (
    <div className="scroll">
      <table className="grid stacked">
        <thead>
          <tr>
            <th>{columns.incident}</th>
            <th>{columns.job}</th>
            <th>{columns.failed}</th>
            <th>{columns.shares}</th>
            <th>{columns.outcome}</th>
            <th className="n">{columns.steps}</th>
          </tr>
        </thead>
        <tbody>
          {similar.map((each) => (
            <tr key={each.IncidentId}>
              <td data-name={columns.incident}>
                <Link className="id" to={`/incidents/${encodeURIComponent(each.IncidentId)}`}>
                  {each.IncidentId}
                </Link>
              </td>
              <td className="name" data-name={columns.job}>
                <JobLink name={each.TrainingJobName} address={addressOf(each)} />
              </td>
              <td className="moment" data-name={columns.failed}>
                <Ago at={each.OpenedAt} />
              </td>
              <td data-name={columns.shares}>{shares(each.Likeness)}</td>
              <td data-name={columns.outcome}>
                <Status {...OUTCOMES[each.Outcome]} />
              </td>
              <td className="n" data-name={columns.steps}>
                {each.LostSteps === undefined ? '–' : count(each.LostSteps)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}
