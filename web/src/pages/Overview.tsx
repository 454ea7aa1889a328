/** The home page: whether anything needs a person, jobs by status, open incidents and the capacity of the fleets. */
import { useDocumentTitle } from '@mantine/hooks'
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
import { phaseWords } from '../model/causes'
import { Ago, Empty, Shown, Status, ToneIcon, Unbroken, useNow, useIsStale } from '../parts/Basics'
import { Card, Figures } from '../parts/Card'
import { PageHead, type VerdictLine } from '../parts/PageHead'
import { toneOfDuty } from '../words/duty'
import { JOBS } from '../words/jobs'
import { OVERVIEW } from '../words/overview'
import { FIRST_COMMAND } from '../words/commands'

export default function OverviewPage() {
  useDocumentTitle('Overview, Everstep')
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
      <div className="stack">
        <PageHead title={OVERVIEW.title} />
        <Shown query={{ ...waiting, data: undefined }} rows={8}>
          {() => null}
        </Shown>
      </div>
    )
  }
  return (
    <div className="stack">
      <PageHead title={OVERVIEW.title} verdict={verdictOf(duties.data, jobs.data, incidents.data)} />
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
    </div>
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
                <Link to={`/incidents/${encodeURIComponent(each.IncidentId)}`}>{each.TrainingJobName}</Link>{' '}
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
        <div className="scroll" tabIndex={0} role="region" aria-label={title}>
          <table className="grid stacked">
            <thead>
              <tr>
                <th>{columns.fleet}</th>
                <th>{columns.status}</th>
                <th className="n">{columns.use}</th>
                <th className="n">{columns.spare}</th>
                <th className="n">{columns.held}</th>
                <th className="n">{columns.missing}</th>
                <th className="n">{columns.limit}</th>
              </tr>
            </thead>
            <tbody>
              {fleets.map((fleet) => {
                const figures = fleetFigures(fleet, { isStale })
                const { inUse, spare, held } = capacityOf(fleet, nodes)
                return (
                  <tr key={fleet.FleetName}>
                    <td className="name" data-name={columns.fleet}>
                      <Link to={`/fleets/${encodeURIComponent(fleet.FleetName)}`}>{fleet.FleetName}</Link>
                    </td>
                    <td data-name={columns.status} {...hook(figures, 'status')}>
                      <Status tone={figures.statusTone} word={figures.status} title={fleet.Reason} />
                    </td>
                    <td className="n" data-name={columns.use}>
                      {count(inUse)}
                    </td>
                    <td className="n" data-name={columns.spare}>
                      {count(spare)}
                    </td>
                    <td className="n" data-name={columns.held}>
                      {count(held)}
                    </td>
                    <td
                      className={`n${figures.missingNodes ? ' tone-warn' : ''}`}
                      data-name={columns.missing}
                      {...hook(figures, 'missingNodes')}
                    >
                      {shown(figures, 'missingNodes')}
                    </td>
                    <td className="n" data-name={columns.limit}>
                      {count(fleet.MaxNodeCount)}
                    </td>
                  </tr>
                )
              })}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  )
}
