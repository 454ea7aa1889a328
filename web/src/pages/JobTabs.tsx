/** The Protection, Checkpoints and Events tabs of a job. */
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useSearchParams } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { checkpointsQuery, eventsQuery, olderEvents, protectionQuery } from '../api/queries'
import { ProtectionMatrix } from '../charts/ProtectionMatrix'
import type { Checkpoint, DescribeProtectionResponse, Event, TrainingJob } from '../contract'
import { hook, jobFigures, shown, type JobFigures } from '../model/figures'
import { bytes, count, percent, plural } from '../model/format'
import { losses, survivesOneLoss } from '../model/matrix'
import type { Tone } from '../model/standing'
import { ActionButton } from '../parts/ActionButton'
import {
  Ago, Empty, FactList, Filter, NodeLink, Shown, Status, toneOf, useStaleSeconds, type Fact,
} from '../parts/Basics'
import { Card } from '../parts/Card'
import { CopyId } from '../parts/CopyId'
import { Stacks } from '../parts/Stacks'
import { JOB } from '../words/job'
import { CHECKPOINTS_TAB, EVENTS_TAB, PROTECTION_TAB } from '../words/jobTabs'

export function ProtectionTab({ job }: { job: TrainingJob }) {
  const query = useQuery(protectionQuery(useJobAddress(job)))
  const staleSeconds = useStaleSeconds()
  return (
    <Shown query={query}>
      {(protection) => {
        const figures = jobFigures(job, { protection, staleSeconds })
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
              <Empty title={PROTECTION_TAB.empty}>{protection.Reason}</Empty>
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
      words.state, <Status key="state" tone={figures.protectionTone} word={figures.protection} />,
      hook(figures, 'protection'),
    ],
    [words.survives, survives === undefined ? JOB.figures.unknown : survives ? JOB.figures.yes : JOB.figures.no],
    [
      words.committed,
      figures.committedStep === undefined ? '–' : <>{step('committedStep')}, <Ago at={protection.CommittedAt} /></>,
      hook(figures, 'committedStep'),
    ],
    [words.proposed, protection.ProposedStep < 0 ? '–' : JOB.figures.step(count(protection.ProposedStep))],
    protection.ParityGroupSize === undefined
      ? [words.copies, words.ownIncluded(count(protection.Copies))]
      : [words.parity, words.parityGroup(count(protection.ParityGroupSize))],
    [
      words.checkpoint,
      checkpoint ? <>{step('checkpointStep')}, <Ago at={checkpoint.CompletedAt} /></> : JOB.figures.none,
      hook(figures, 'checkpointStep'),
    ],
  ]
}

function LossTable({ protection, figures }: { protection: DescribeProtectionResponse; figures: JobFigures }) {
  const words = PROTECTION_TAB.odds
  const domains = protection.FatalDomains ?? []
  /** The odds assume that all reported holders answer. */
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
      <div className="scroll" tabIndex={0} role="region" aria-label={words.title}>
        <table className="grid">
          <thead>
            <tr>
              <th>{words.lost}</th>
              <th>{words.survives}</th>
              <th>{words.otherwise}</th>
            </tr>
          </thead>
          <tbody>
            {losses(protection).map(({ lost, probability }) => (
              <tr key={lost}>
                <td>{words.any(lost)}</td>
                <td>
                  <Status tone={tone(probability)} word={oddsWord(probability)} />
                </td>
                <td className="dim">{probability >= 1 ? '–' : otherwise}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
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

export function CheckpointsTab({ job }: { job: TrainingJob }) {
  const query = useQuery(checkpointsQuery(useJobAddress(job)))
  const words = CHECKPOINTS_TAB
  const activity = job.CheckpointActivity
  const next = activity?.NextStep === undefined ? '' : words.next(count(activity.NextStep))
  const policy = words.policy(activity?.Policy ?? words.onStop)
  return (
    <div className="stack">
      <UploadLine job={job} />
      <Shown query={query}>
        {(checkpoints) =>
          checkpoints.length ? (
            <CheckpointTable checkpoints={checkpoints} />
          ) : (
            <Empty title={words.empty}>{[policy, next, words.memory].filter(Boolean).join(' ')}</Empty>
          )
        }
      </Shown>
    </div>
  )
}

/** The checkpoint that is being uploaded, and the progress of the slowest rank. */
function UploadLine({ job }: { job: TrainingJob }) {
  const upload = job.CheckpointActivity?.Upload
  if (upload === undefined) return null
  const share = upload.TotalBytes ? upload.StoredBytes / upload.TotalBytes : 0
  const stored = bytes(upload.SlowestStoredBytes)
  const total = bytes(upload.SlowestTotalBytes)
  const text = CHECKPOINTS_TAB.uploading(count(upload.Step), percent(share), upload.SlowestRank, stored, total)
  return <p title={upload.SlowestObject}>{text}</p>
}

function CheckpointTable({ checkpoints }: { checkpoints: Checkpoint[] }) {
  const { columns, pinned, notVerified } = CHECKPOINTS_TAB
  return (
    <Card isFlush label={JOB.tabs.checkpoints}>
      <div className="scroll">
        <table className="grid stacked">
          <thead>
            <tr>
              <th>{columns.step}</th>
              <th>{columns.status}</th>
              <th>{columns.launch}</th>
              <th className="n">{columns.size}</th>
              <th>{columns.complete}</th>
              <th>{columns.verified}</th>
              <th>{columns.manifest}</th>
            </tr>
          </thead>
          <tbody>
            {checkpoints.map((each) => (
              <tr key={`${each.Step}-${each.Generation}`}>
                <td data-name={columns.step}>{count(each.Step)}</td>
                <td data-name={columns.status}>
                  <Status
                    tone={toneOf(each.Verification === 'Damaged' ? each.Verification : each.Status)}
                    word={each.Status}
                  />
                  {each.IsPinned && <div className="dim">{pinned}</div>}
                </td>
                <td data-name={columns.launch}>{each.Generation}</td>
                <td className="n" data-name={columns.size}>{bytes(each.Bytes)}</td>
                <td className="moment" data-name={columns.complete}><Ago at={each.CompletionTime} /></td>
                <td data-name={columns.verified}>
                  {each.Verification === undefined || each.Verification === 'NotVerified' ? (
                    <span className="dim">{notVerified}</span>
                  ) : (
                    <Status tone={toneOf(each.Verification)} word={each.Verification} />
                  )}
                  {each.VerificationTime !== undefined && <> <Ago at={each.VerificationTime} /></>}
                  {each.VerificationMessage && <div className="dim">{each.VerificationMessage}</div>}
                </td>
                <td className="reason"><CopyId id={each.S3Uri} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  )
}

const MOST_ROWS = 500

export function EventsTab({ job }: { job: TrainingJob }) {
  return <EventList scope={{ job: useJobAddress(job) }} />
}

/** The events of a job or of a fleet, newest first, with a filter in the address. `most`: rows that are drawn. */
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
                <ActionButton action={() => olderEvents(client, scope)}>{words.older}</ActionButton>
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

const textOf = (event: Event): string => `${event.Type} ${event.Message} ${event.NodeId ?? ''}`.toLowerCase()

function EventTable({ events }: { events: Event[] }) {
  const { columns } = EVENTS_TAB
  return (
    <div className="scroll">
      <table className="grid stacked">
        <thead>
          <tr>
            <th>{columns.when}</th>
            <th>{columns.event}</th>
            <th>{columns.message}</th>
            <th>{columns.node}</th>
          </tr>
        </thead>
        <tbody>
          {events.map((event) => (
            <tr key={event.EventId}>
              <td className="moment" data-name={columns.when}><Ago at={event.Time} /></td>
              <td data-name={columns.event}>{event.Type}</td>
              <td className="reason wide">
                {event.Message}
                <Stacks event={event} />
              </td>
              <td data-name={columns.node}>
                {event.NodeId ? <NodeLink id={event.NodeId} fleet={event.FleetName} /> : '–'}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}
