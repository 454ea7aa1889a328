/** The home page: whether anything needs a person, jobs by status, open incidents and the capacity of the fleets. */
import { useQuery } from '@tanstack/react-query'
import { Link } from 'react-router'

import { serverTime } from '../api/client'
import { dutiesQuery, fleetsQuery, jobsQuery, nodesQuery, openIncidentsQuery, reportQuery } from '../api/queries'
import type { Fleet, Incident, Node, SubjectDuty, TrainingJobSummary } from '../contract'
import { capacityOf } from '../model/fleets'
import { addressesOf, jobsByStatus } from '../model/jobs'
import { count, duration } from '../model/format'
import { dutyHook, fleetFigures, hook, shown } from '../model/figures'
import { hours, money, ratio, startOfDay } from '../model/reports'
import type { VerdictLine } from '../model/standing'
import { phaseWords } from '../model/causes'
import {
  Ago,
  Empty,
  FleetLink,
  IncidentLink,
  Shown,
  Status,
  ToneIcon,
  Unbroken,
  useNow,
  useIsStale,
} from '../parts/Basics'
import { Card, Figures } from '../parts/Card'
import { Page } from '../parts/PageHead'
import { Table } from '../parts/Table'
import { toneOfDuty } from '../words/duty'
import { JOBS } from '../words/jobs'
import { OVERVIEW } from '../words/overview'
import { FIRST_COMMAND } from '../words/commands'

export default function OverviewPage() {
  const jobs = useQuery(jobsQuery)
  const fleets = useQuery(fleetsQuery)
  const nodes = useQuery(nodesQuery())
  const incidents = useQuery(openIncidentsQuery)
  const duties = useQuery(dutiesQuery)
  const now = useNow()
  const queries = [jobs, fleets, nodes, incidents, duties]
  if (!jobs.data || !fleets.data || !nodes.data || !incidents.data || !duties.data) {
    const waiting = queries.find((query) => query.error) ?? jobs
    return (
      <Page title={OVERVIEW.title}>
        <Shown query={{ ...waiting, data: undefined }} rows={8}>
          {() => null}
        </Shown>
      </Page>
    )
  }
  return (
    <Page title={OVERVIEW.title} verdict={verdictOf(duties.data, jobs.data, incidents.data)}>
      {jobs.data.length === 0 ? (
        <Empty title={OVERVIEW.verdict.empty} command={FIRST_COMMAND} />
      ) : (
        <JobCounts jobs={jobs.data} />
      )}
      <div className="split">
        <Attention duties={duties.data} jobs={jobs.data} />
        <OpenIncidents incidents={incidents.data} now={now} />
      </div>
      <Today />
      <CapacityTable fleets={fleets.data} nodes={nodes.data} />
    </Page>
  )
}

function verdictOf(
  duties: readonly SubjectDuty[],
  jobs: readonly TrainingJobSummary[],
  incidents: readonly Incident[],
): VerdictLine {
  const words = OVERVIEW.verdict
  const training = jobs.filter((job) => job.SecondaryStatus === 'Training').length
  const recovering = new Set(incidents.map((each) => each.RunId)).size
  const text = [training ? words.training(training) : '', recovering ? words.recovering(recovering) : '']
    .filter(Boolean)
    .join(' ')
  if (duties.length) return { tone: toneOfDuty(duties[0]!.Duty), lead: words.act(duties.length), text }
  return { tone: recovering ? 'busy' : training ? 'good' : 'idle', lead: words.calm, text }
}

function JobCounts({ jobs }: { jobs: TrainingJobSummary[] }) {
  return (
    <Card title={OVERVIEW.jobs}>
      <Figures
        isLarge
        figures={jobsByStatus(jobs).map(({ status, word, tone, count: number, pressing }) => ({
          label: word,
          name: `jobs-${status.toLowerCase()}`,
          note: pressing ? JOBS.ofThem(pressing) : undefined,
          value: (
            <Link to={`/jobs?status=${status}`} className={`tone-${tone}`}>
              {count(number)}
            </Link>
          ),
        }))}
      />
    </Card>
  )
}

/** ETTR and cost since 00:00 UTC, with a link to the report. */
function Today() {
  const today = () => ({ StartTime: startOfDay(serverTime()), Period: 'Day' as const, MaxJobs: 0 })
  const query = useQuery(reportQuery(['today'], today))
  const words = OVERVIEW.today
  return (
    <Card title={words.title} actions={<Link to="/reports">{words.more}</Link>}>
      <Shown query={query} rows={2}>
        {({ Total }) => {
          const { EttrRatio, CostUsd, NodeSeconds, Failures, SpareCostUsd, IdleNodeSeconds } = Total
          const nodeHours = words.costNote(hours(NodeSeconds))
          const failures = words.failuresNote(money(Failures.CostUsd))
          const spares = words.sparesNote(hours(IdleNodeSeconds.spare ?? 0))
          return (
            <Figures
              isLarge
              figures={[
                { label: words.ettr, name: 'today-ettr', value: ratio(EttrRatio), note: words.ettrNote },
                { label: words.cost, name: 'today-cost', value: money(CostUsd), note: nodeHours },
                { label: words.failures, name: 'today-failures', value: count(Failures.Count), note: failures },
                { label: words.spares, name: 'today-spares', value: money(SpareCostUsd), note: spares },
              ]}
            />
          )
        }}
      </Shown>
    </Card>
  )
}

/** The jobs and fleets that need a person, in the order of the server. */
function Attention({ duties, jobs }: { duties: readonly SubjectDuty[]; jobs: readonly TrainingJobSummary[] }) {
  const addressOf = addressesOf(jobs)
  const isStale = useIsStale()
  return (
    <Card title={OVERVIEW.attention.title}>
      {duties.length === 0 ? (
        <p className="dim">{OVERVIEW.attention.none}</p>
      ) : (
        <ul className="rows">
          {duties.map(({ TrainingJobName: name, RunId, FleetName, Duty: duty }) => {
            const of = name === undefined ? `fleet/${FleetName}` : `job/${RunId}`
            const job = name === undefined ? undefined : addressOf({ TrainingJobName: name, RunId })
            const to =
              job === undefined ? `/fleets/${encodeURIComponent(FleetName)}` : `/jobs/${encodeURIComponent(job)}`
            return (
              <li key={of} className={`tone-${toneOfDuty(duty)}`} {...dutyHook({ of, isStale }, duty)}>
                <ToneIcon tone={toneOfDuty(duty)} />
                <span className="grow">
                  <Link to={to}>
                    <Unbroken text={name ?? FleetName} />
                  </Link>{' '}
                  <Unbroken text={duty.Sentence} />
                </span>
                {duty.Since !== undefined && (
                  <span className="when">
                    <Ago at={duty.Since} />
                  </span>
                )}
              </li>
            )
          })}
        </ul>
      )}
    </Card>
  )
}

function OpenIncidents({ incidents, now }: { incidents: Incident[]; now: number }) {
  return (
    <Card title={OVERVIEW.incidents.title}>
      {incidents.length === 0 ? (
        <p className="dim">{OVERVIEW.incidents.none}</p>
      ) : (
        <ul className="rows">
          {incidents.toReversed().map((each) => (
            <li key={each.IncidentId} className="tone-busy">
              <ToneIcon tone="busy" />
              <span className="grow">
                <IncidentLink id={each.IncidentId}>{each.TrainingJobName}</IncidentLink>{' '}
                <Unbroken text={each.Headline} />
              </span>
              <span className="when">
                {phaseWords(each.Phase, each)} {OVERVIEW.incidents.since(duration(Math.max(0, now - each.FailedAt)))}
              </span>
            </li>
          ))}
        </ul>
      )}
    </Card>
  )
}

function CapacityTable({ fleets, nodes }: { fleets: Fleet[]; nodes: Node[] }) {
  const { title, none, columns } = OVERVIEW.capacity
  const isStale = useIsStale()
  return (
    <Card title={title} isFlush>
      {fleets.length === 0 ? (
        <p className="dim empty">{none}</p>
      ) : (
        <Table
          label={title}
          rows={fleets.map((fleet) => ({
            fleet,
            figures: fleetFigures(fleet, { isStale }),
            ...capacityOf(fleet, nodes),
          }))}
          keyOf={({ fleet }) => fleet.FleetName}
          columns={[
            [columns.fleet, ({ fleet }) => <FleetLink name={fleet.FleetName} />, 'name'],
            [
              columns.status,
              ({ fleet, figures }) => <Status tone={figures.statusTone} word={figures.status} title={fleet.Reason} />,
              undefined,
              ({ figures }) => hook(figures, 'status'),
            ],
            [columns.use, ({ inUse }) => count(inUse), 'n'],
            [columns.spare, ({ spare }) => count(spare), 'n'],
            [columns.held, ({ held }) => count(held), 'n'],
            [
              columns.missing,
              ({ figures }) => shown(figures, 'missingNodes'),
              'n',
              ({ figures }) => ({
                ...hook(figures, 'missingNodes'),
                className: figures.missingNodes ? 'n tone-warn' : 'n',
              }),
            ],
            [columns.limit, ({ fleet }) => count(fleet.MaxNodeCount), 'n'],
          ]}
        />
      )}
    </Card>
  )
}
