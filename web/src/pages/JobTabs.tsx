/** The Protection and Events tabs of a job. */
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useSearchParams } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { eventsQuery, olderEvents, protectionQuery } from '../api/queries'
import { ProtectionMatrix } from '../charts/ProtectionMatrix'
import type { DescribeProtectionResponse, Event, TrainingJob } from '../contract'
import { hook, jobFigures, shown, type JobFigures } from '../model/figures'
import { count, percent, plural, words } from '../model/format'
import { losses, survivesOneLoss } from '../model/matrix'
import type { Tone } from '../model/standing'
import { ActionButton } from '../parts/ActionButton'
import { Ago, Empty, FactList, Filter, NodeLink, Shown, Status, useIsStale, type Fact } from '../parts/Basics'
import { Card } from '../parts/Card'
import { Stacks } from '../parts/Stacks'
import { Table } from '../parts/Table'
import { JOB } from '../words/job'
import { EVENTS_TAB, PROTECTION_TAB } from '../words/jobTabs'

export function ProtectionTab({ job }: { job: TrainingJob }) {
  const query = useQuery(protectionQuery(useJobAddress(job)))
  const isStale = useIsStale()
  return (
    <Shown query={query}>
      {(protection) => {
        const figures = jobFigures(job, { protection, isStale })
        return (
          <div className="stack">
            <Card>
              <FactList facts={protectionFacts(protection, figures)} />
              {protection.Reason && <p className="note">{protection.Reason}</p>}
            </Card>
            {(protection.RecoveryOdds ?? []).length > 0 && <LossTable protection={protection} figures={figures} />}
            {(protection.Shards ?? []).length ? (
              <Card title={PROTECTION_TAB.shards}>
                <ProtectionMatrix protection={protection} />
              </Card>
            ) : (
              <Empty title={PROTECTION_TAB.empty} text={protection.Reason} />
            )}
          </div>
        )
      }}
    </Shown>
  )
}

function protectionFacts(protection: DescribeProtectionResponse, figures: JobFigures): Fact[] {
  const words = PROTECTION_TAB
  const survives = survivesOneLoss(protection, figures.protection)
  const step = (field: 'committedStep' | 'checkpointStep') => JOB.figures.step(shown(figures, field))
  const checkpoint = protection.LastCheckpoint
  return [
    [
      words.state,
      <Status key="state" tone={figures.protectionTone} word={figures.protection} />,
      hook(figures, 'protection'),
    ],
    [words.survives, survives === undefined ? JOB.figures.unknown : survives ? JOB.figures.yes : JOB.figures.no],
    [
      words.committed,
      figures.committedStep === undefined ? (
        '–'
      ) : (
        <>
          {step('committedStep')}, <Ago at={protection.CommittedAt} />
        </>
      ),
      hook(figures, 'committedStep'),
    ],
    [words.proposed, protection.ProposedStep < 0 ? '–' : JOB.figures.step(count(protection.ProposedStep))],
    protection.ParityGroupSize === undefined
      ? [words.copies, words.ownIncluded(count(protection.Copies))]
      : [words.parity, words.parityGroup(count(protection.ParityGroupSize))],
    [
      words.checkpoint,
      checkpoint ? (
        <>
          {step('checkpointStep')}, <Ago at={checkpoint.CompletedAt} />
        </>
      ) : (
        JOB.figures.none
      ),
      hook(figures, 'checkpointStep'),
    ],
  ]
}

function LossTable({ protection, figures }: { protection: DescribeProtectionResponse; figures: JobFigures }) {
  const words = PROTECTION_TAB.odds
  const domains = protection.FatalDomains ?? []
  /** False if a holder is perhaps lost since the last report. The odds assume that no reported holder is lost. */
  const isCertain = figures.protection !== 'Unconfirmed' && !figures.isStale
  const tone = (probability: number): Tone =>
    probability >= 1 ? (isCertain ? 'good' : 'idle') : probability > 0.5 ? 'warn' : 'bad'
  const oddsWord = (probability: number) =>
    probability >= 1 ? words.always : probability <= 0 ? words.never : words.cases(percent(probability))
  const checkpoint = protection.LastCheckpoint?.Step
  const otherwise =
    checkpoint === undefined
      ? words.start
      : words.checkpoint(count(checkpoint), plural(Math.max(0, protection.CommittedStep - checkpoint), 'step'))
  return (
    <Card title={words.title} isFlush>
      <Table
        label={words.title}
        isStacked={false}
        rows={losses(protection)}
        keyOf={({ lost }) => lost}
        columns={[
          [words.lost, ({ lost }) => words.any(lost)],
          [words.survives, ({ probability }) => <Status tone={tone(probability)} word={oddsWord(probability)} />],
          [words.otherwise, ({ probability }) => (probability >= 1 ? '–' : otherwise), 'dim'],
        ]}
      />
      <p className="dim note">
        {words.note} {(protection.DomainOdds ?? []).length ? words.domains : words.noDomains}
      </p>
      {domains.length > 0 && (
        <p className="note">
          <Status tone="warn" word={words.fatal} /> {words.fatalText(domains.join(', '))}
        </p>
      )}
    </Card>
  )
}

const MOST_ROWS = 500

export function EventsTab({ job }: { job: TrainingJob }) {
  return <EventList scope={{ job: useJobAddress(job) }} />
}

/** The events of a job or of a fleet, newest first, with a filter in the URL. `most`: maximum number of rows. */
export function EventList({ scope, most = MOST_ROWS }: { scope: { job?: string; fleet?: string }; most?: number }) {
  const query = useQuery(eventsQuery(scope))
  const [search, setSearch] = useSearchParams()
  const client = useQueryClient()
  const filter = search.get('q') ?? ''
  const words = EVENTS_TAB
  return (
    <Shown query={query}>
      {({ events, older }) => {
        const matches = events.filter((event) => textOf(event).includes(filter.toLowerCase())).toReversed()
        return (
          <section className="card stack">
            <Filter
              label={words.filter}
              placeholder={words.placeholder}
              value={filter}
              onChange={(value) => setSearch(value ? { q: value } : {}, { replace: true })}
            />
            {matches.length ? (
              <EventTable events={matches.slice(0, most)} />
            ) : (
              <p className="dim">{events.length ? words.noMatch : words.none}</p>
            )}
            {matches.length > most && <p className="dim">{words.newest(most, count(matches.length))}</p>}
            {older !== undefined && (
              <div className="row">
                <ActionButton operation="ListEvents" action={() => olderEvents(client, scope)}>
                  {words.older}
                </ActionButton>
                <span className="dim">
                  {words.loaded(count(events.length))} <Ago at={events[0]?.Time} />.
                </span>
              </div>
            )}
          </section>
        )
      }}
    </Shown>
  )
}

const textOf = (event: Event): string =>
  `${event.Type} ${words(event.Type)} ${event.Message} ${event.NodeId ?? ''}`.toLowerCase()

function EventTable({ events }: { events: Event[] }) {
  const { columns } = EVENTS_TAB
  return (
    <Table
      rows={events}
      keyOf={(event) => event.EventId}
      columns={[
        [columns.when, (event) => <Ago at={event.Time} />, 'moment'],
        [columns.event, (event) => words(event.Type)],
        [
          columns.message,
          (event) => (
            <>
              {event.Message}
              <Stacks event={event} />
            </>
          ),
          'reason wide',
        ],
        [columns.node, ({ NodeId, FleetName }) => (NodeId ? <NodeLink id={NodeId} fleet={FleetName} /> : '–')],
      ]}
    />
  )
}
