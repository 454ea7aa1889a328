/** The page of one incident: first what happened and what to do, then the timeline and the figures. */
import { Button } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import { call } from '../api/client'
import {
  eventsAroundQuery,
  incidentQuery,
  jobQuery,
  printedQuery,
  protectionQuery,
  similarIncidentsQuery,
} from '../api/queries'
import type { Incident, SimilarIncident } from '../contract'
import { plain } from '../model/ansi'
import { phaseColor, phaseWords, sourceWords } from '../model/causes'
import { incidentLine, isPressing, resubmission, urgencyOf } from '../model/duty'
import {
  hook,
  incidentFigures,
  jobFigures,
  phaseHook,
  phaseTexts,
  similarFigures,
  type Field,
  type IncidentFigures,
} from '../model/figures'
import { capitalized, clock, count, duration, utc } from '../model/format'
import { standingOf } from '../model/incident'
import { hasStacks, momentsOf, type Moment } from '../model/incidentTimeline'
import { inLineOrder } from '../model/printed'
import { isOver } from '../model/standing'
import {
  Ago,
  IncidentLink,
  JobLink,
  Shown,
  Status,
  ToneIcon,
  Unbroken,
  useIsStale,
  useNow,
  Value,
} from '../parts/Basics'
import { Card, Figures } from '../parts/Card'
import { CopyId } from '../parts/CopyId'
import { Acknowledge } from '../parts/Acknowledge'
import { ActionButton } from '../parts/ActionButton'
import { download } from '../parts/download'
import { ContinuingCost, Happened, NodeList } from '../parts/Happened'
import { PhaseBar } from '../parts/IncidentTable'
import { LastLines } from '../parts/LastLines'
import { Notes } from '../parts/Notes'
import { Owner } from '../parts/Owner'
import { PageHead } from '../parts/PageHead'
import { Stacks } from '../parts/Stacks'
import { Steps } from '../parts/Steps'
import { figureColumn, Table } from '../parts/Table'
import { DUTY } from '../words/duty'
import { INCIDENT, NOTES, OUTCOMES } from '../words/incident'
import { JOB } from '../words/job'

const AROUND_SECONDS = 30

export default function IncidentPage() {
  const { id = '' } = useParams()
  useDocumentTitle(`Incident ${id}, Everstep`)
  const query = useQuery(incidentQuery(id))
  return <Shown query={query}>{(incident) => <Described incident={incident} />}</Shown>
}

/** The props that all sections of the page receive. */
interface Shared {
  incident: Incident
  figures: IncidentFigures
  /** The fleet of the incident's job, for links to nodes. */
  fleet?: string
}

function Described({ incident }: { incident: Incident }) {
  const now = useNow()
  const address = useJobAddresses()(incident)
  const described = useQuery(jobQuery(address)).data
  // A deleted job's name may belong to another job, whose description must not be shown here.
  const job = described?.RunId === incident.RunId ? described : undefined
  const protection = useQuery({ ...protectionQuery(address), enabled: job !== undefined && isOver(job) }).data
  const figures = incidentFigures(incident, now, job, { protection, isStale: useIsStale() })
  const shared: Shared = { incident, figures, fleet: job?.FleetName }
  const { checkpointStep } = jobFigures(job ?? {}, { protection })
  // Until the answer about checkpoints arrives, offer no new submission, because its first step is unknown.
  const again = job && protection && isOver(job) ? resubmission(job, checkpointStep) : undefined
  return (
    <div className="stack">
      <Head {...shared} address={address} />
      <div className="incident">
        <div className="stack">
          <Card label={INCIDENT.happened.title}>
            <Happened {...shared} isTitled jobReason={figures.isOpen ? job?.Reason : undefined} />
          </Card>
        </div>
        <div className="stack">
          <ToDo incident={incident} fleet={job?.FleetName} again={again} />
        </div>
      </div>
      <Phases {...shared} />
      <Timeline incident={incident} address={address} />
      <Card title={INCIDENT.people.title} label={INCIDENT.people.title}>
        <Owner incident={incident} />
        <Acknowledged incident={incident} />
        <h3 className="below">{NOTES.title}</h3>
        <Notes
          notes={incident.Notes ?? []}
          create={(Text, ClientRequestToken) =>
            call('CreateIncidentNote', { IncidentId: incident.IncidentId, Text, ClientRequestToken })
          }
        />
      </Card>
      <Facts {...shared} />
      <Similar incident={incident} />
    </div>
  )
}

function Head({ incident, figures, address }: Shared & { address: string }) {
  const save = async () => {
    const document = await call('ExportIncident', { IncidentId: incident.IncidentId, Format: 'markdown' })
    download(document.FileName, [document.Content], 'text/markdown')
  }
  return (
    <PageHead
      crumbs={
        <>
          <Link to="/incidents">{INCIDENT.crumb}</Link>
          {' / '}
          <JobLink name={incident.TrainingJobName} address={address} />
          {' / '}
          <span className="dim">
            <CopyId id={incident.IncidentId} />
          </span>
        </>
      }
      title={<Unbroken text={incident.Headline} />}
      status={
        <>
          <Status {...standingOf(incident)} />
          {figures.isOpen && incident.Wait === undefined && (
            <span {...hook(figures, 'phase')}>
              <Status tone={figures.phaseTone} word={figures.phase} />
            </span>
          )}
        </>
      }
      actions={
        <>
          <Acknowledge incident={incident} />
          <ActionButton operation="ExportIncident" action={save}>
            {INCIDENT.export}
          </ActionButton>
          <Button
            component="a"
            size="xs"
            variant="default"
            target="_blank"
            rel="noreferrer"
            href={`/runbook.html#${encodeURIComponent(incident.Cause)}`}
          >
            {INCIDENT.runbook}
          </Button>
        </>
      }
      verdict={incidentLine(incident)}
    />
  )
}

/** The person who has acknowledged the incident. */
function Acknowledged({ incident }: { incident: Incident }) {
  if (incident.AcknowledgementTime === undefined) return null
  return (
    <p className="dim below">
      {INCIDENT.acknowledged} {incident.AcknowledgedBy} <Ago at={incident.AcknowledgementTime} />
    </p>
  )
}

interface ToDoProps {
  incident: Incident
  fleet?: string
  /** Path of the form that submits a failed job again. */
  again?: string
}

function ToDo({ incident, ...context }: ToDoProps) {
  const { Actions: actions = [], RunId: runId, Wait } = incident
  const urgency = urgencyOf(actions)
  const isDecision = isPressing({ Urgency: urgency })
  const isChoice = Wait !== undefined && actions.every((each) => each.InstanceId === undefined)
  return (
    <div className={isDecision ? 'pressing' : undefined}>
      <Card title={DUTY.title} label={DUTY.title}>
        {actions.length === 0 && <p className="dim">{DUTY.none}</p>}
        {isChoice ? (
          <Choices incident={incident} isDecision={isDecision} />
        ) : (
          <>
            <Steps actions={actions} runId={runId} urgency={urgency} {...context} />
            <ContinuingCost incident={incident} />
          </>
        )}
      </Card>
    </div>
  )
}

/** The actions that a person can take instead of waiting for AWS. Only the recommended action is unfolded. */
function Choices({ incident, isDecision }: { incident: Incident; isDecision: boolean }) {
  const words = INCIDENT.wait
  const { Actions: actions = [] } = incident
  const recommended = actions.filter((each) => each.IsRecommended)
  const others = actions.filter((each) => !each.IsRecommended)
  return (
    <>
      {recommended.length === 0 && isDecision && <p>{words.recommended}</p>}
      <Steps actions={recommended} runId={incident.RunId} isChoice />
      {others.length === 0 && <ContinuingCost incident={incident} />}
      {others.length > 0 && (
        <details>
          <summary className="dim">{words.other(others.length, isDecision)}</summary>
          {isDecision && <p>{words.undecided}</p>}
          <Steps actions={others} runId={incident.RunId} isChoice />
          <ContinuingCost incident={incident} />
        </details>
      )}
    </>
  )
}

function Phases({ incident, figures }: Shared) {
  return (
    <Card title={INCIDENT.phases.title} label={INCIDENT.phases.title}>
      <PhaseBar incident={incident} height={24} width="100%" />
      <ul className="legend">
        {figures.phases.map(({ phase, seconds, isOpen }, index) => (
          <li key={phase} title={duration(seconds)} {...phaseHook(incident, phase, seconds)}>
            <span className="key" style={{ background: phaseColor(phase, incident) }} />
            <span>
              {capitalized(phaseWords(phase, incident))} {isOpen && <span className="dim">{INCIDENT.phases.now}</span>}
            </span>
            <span>{phaseTexts(figures.phases)[index]}</span>
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
        <Unbroken text={title} />
        {note && <p className="text">{note.Text}</p>}
        {lines && (
          <LastLines
            text={lines
              .map((line) => {
                const who = line.Rank === undefined ? line.NodeId : `rank ${line.Rank}`
                return `${clock(line.Timestamp)} ${who}  ${plain(line.Message)}`
              })
              .join('\n')}
          />
        )}
        {event && hasStacks(event) && <Stacks event={event} />}
      </div>
    </li>
  )
}

function Facts({ incident, figures, fleet }: Shared) {
  const words = INCIDENT.facts
  const nodes = (ids: readonly string[] | undefined, none: string = words.none) =>
    ids?.length ? <NodeList ids={ids} fleet={fleet} /> : none
  const sources = (incident.RankSources ?? []).map(({ FirstRank, LastRank, Source }) => {
    const ranks = FirstRank === LastRank ? `rank ${FirstRank}` : `ranks ${FirstRank}–${LastRank}`
    return <div key={FirstRank}>{`${ranks}: ${sourceWords(Source)}`}</div>
  })
  const after = incident.GenerationAfter === undefined ? '…' : String(incident.GenerationAfter)
  const size = (nodeCount?: number) => (nodeCount === undefined ? '…' : count(nodeCount))
  const figure = (label: string, field: Field<IncidentFigures>) => ({
    label,
    value: <Value of={figures} field={field} />,
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
          figures.costUsd === undefined
            ? { label: words.cost, value: JOB.figures.noPrice }
            : figure(words.cost, 'costUsd'),
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
      <Shown query={query} rows={2} empty={<p className="dim empty">{none}</p>}>
        {(similar) => <SimilarTable similar={similar} />}
      </Shown>
    </Card>
  )
}

function SimilarTable({ similar }: { similar: readonly SimilarIncident[] }) {
  const { columns, shares } = INCIDENT.similar
  const addressOf = useJobAddresses()
  return (
    <Table
      rows={similar}
      keyOf={(each) => each.IncidentId}
      columns={[
        [columns.incident, ({ IncidentId }) => <IncidentLink id={IncidentId} className="id" />],
        [columns.job, (each) => <JobLink name={each.TrainingJobName} address={addressOf(each)} />, 'name'],
        [columns.failed, (each) => <Ago at={each.OpenedAt} />, 'moment'],
        [columns.shares, (each) => shares(each.Likeness)],
        [columns.outcome, (each) => <Status {...OUTCOMES[each.Outcome]} />],
        figureColumn(columns.steps, similarFigures, 'recomputedSteps'),
      ]}
    />
  )
}
