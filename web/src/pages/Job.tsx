/** One job: first what someone at 3 a.m. must know, then everything else. */
import { Button } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { Suspense, useMemo, useState } from 'react'
import { Link, NavLink, useParams } from 'react-router'

import { ApiError, call, serverTime } from '../api/client'
import { useJobAddress } from '../api/addresses'
import { fleetsQuery, incidentsQuery, jobNodesQuery, jobQuery, jobsQuery, nodesQuery, openIncidentsQuery, protectionQuery, useRole } from '../api/queries'
import { part } from '../api/pages'
import { TimelineChart } from '../charts/Timeline'
import { WhereTime } from '../charts/WhereTime'
import type { TrainingJob } from '../contract'
import { lostBy } from '../model/act'
import { conditionLines } from '../model/conditions'
import { count, duration } from '../model/format'
import { hook, incidentFigures, jobFigures, shown } from '../model/figures'
import { story } from '../model/incident'
import { left, progressOf, sampled, type Sample } from '../model/progress'
import { hitAlike, isOver, openIncident, usualRate, verdict } from '../model/verdict'
import { Ago, Empty, FactList, Loading, Shown, Status, useIsStale, useNow, useStaleSeconds } from '../parts/Basics'
import { ConfirmByName } from '../parts/ConfirmByName'
import { Doing } from '../parts/Doing'
import { FirstFold } from '../parts/FirstFold'
import { JobButtons } from '../parts/JobButtons'
import { LastLines } from '../parts/LastLines'
import { Progress } from '../parts/Progress'
import { IncidentTable } from '../parts/IncidentTable'

const JobPeople = part(() => import('../parts/JobPeople'))
const CheckpointsTab = part(async () => ({ default: (await import('./JobTabs')).CheckpointsTab }))
const EventsTab = part(async () => ({ default: (await import('./JobTabs')).EventsTab }))
const ProtectionTab = part(async () => ({ default: (await import('./JobTabs')).ProtectionTab }))
const LogsTab = part(() => import('./JobLogs'))
const SpecTab = part(() => import('./JobSpec'))
const MetricsTab = part(() => import('./JobMetrics'))
const OutputsTab = part(() => import('./JobOutputs'))
const TABS = ['overview', 'metrics', 'logs', 'protection', 'checkpoints', 'outputs', 'events', 'spec'] as const

/** What this browser saw of each job's steps since it was opened. */
const seen = new Map<string, Sample[]>()

export default function JobPage() {
  const { name = '', tab = 'overview' } = useParams()
  const job = useQuery(jobQuery(name))
  useDocumentTitle(job.data ? `${job.data.SecondaryStatus}: ${job.data.TrainingJobName}, Everstep` : `${name}, Everstep`)
  return (
    <Shown query={job} rows={8}>
      {(data) => (
        <div className="stack">
          <Head job={data} staleSeconds={job.error ? Infinity : 0} />
          <Fold job={data} at={serverTime(job.dataUpdatedAt)} error={job.error} />
          <nav className="tabs" aria-label="About this job">
            {TABS.map((each) => (
              <NavLink key={each} to={each === 'overview' ? `/jobs/${encodeURIComponent(name)}` : `/jobs/${encodeURIComponent(name)}/${each}`} end preventScrollReset>
                {each[0]!.toUpperCase() + each.slice(1)}
              </NavLink>
            ))}
          </nav>
          <Suspense fallback={<Loading />}>
            <Tab tab={tab} job={data} />
          </Suspense>
        </div>
      )}
    </Shown>
  )
}

function Tab({ tab, job }: { tab: string; job: TrainingJob }) {
  switch (tab) {
    case 'overview':
      return <Overview job={job} />
    case 'metrics':
      return <MetricsTab job={job} />
    case 'logs':
      return <LogsTab job={job} />
    case 'protection':
      return <ProtectionTab job={job} />
    case 'checkpoints':
      return <CheckpointsTab job={job} />
    case 'outputs':
      return <OutputsTab job={job} />
    case 'events':
      return <EventsTab job={job} />
    case 'spec':
      return <SpecTab job={job} />
    default:
      return <Empty title="There is no such page of this job" />
  }
}

function Head({ job, staleSeconds }: { job: TrainingJob; staleSeconds: number }) {
  const isStale = useIsStale()
  const figures = jobFigures(job, { staleSeconds: isStale ? Infinity : staleSeconds })
  const [isAsking, setAsking] = useState(false)
  const { mayRun } = useRole()
  const client = useQueryClient()
  const name = { TrainingJobName: job.RunId }
  return (
    <div className="row between">
      <div>
        <div className="dim">
          <Link to="/jobs">Jobs</Link>
          {job.Project && <> / project {job.Project}</>}
        </div>
        <div className="row">
          <h1>{job.TrainingJobName}</h1>
          <span {...hook(figures, 'status')}><Status tone={figures.statusTone} word={figures.status} title={job.Reason} /></span>
        </div>
      </div>
      <div className="row">
        <JobButtons job={job} />
        {mayRun && !isOver(job) && job.TrainingJobStatus !== 'Stopping' && (
          <div className="row" role="group" aria-label="What to do with this job">
            {job.TakenOverTime === undefined ? (
              <Doing does={() => call('TakeOverTrainingJob', name)} title="Everstep observes this job and decides nothing until you hand it back">
                Take over
              </Doing>
            ) : (
              <Doing does={() => call('HandBackTrainingJob', name)} title={`Taken over by ${job.TakenOverBy ?? 'a person'}`}>
                Hand back
              </Doing>
            )}
            {job.PauseRequestedTime === undefined ? (
              <Doing does={() => call('PauseTrainingJob', name)} title="All ranks stop at one agreed step, kept in S3; its nodes are free until it is resumed">
                Pause
              </Doing>
            ) : (
              <Doing does={() => call('ResumeTrainingJob', name)} title="It goes on from its checkpoint once its turn in the queue has come">
                Resume
              </Doing>
            )}
            <Button color="red" variant="outline" size="xs" onClick={() => setAsking(true)}>
              Stop
            </Button>
          </div>
        )}
      </div>
      <ConfirmByName
        name={job.TrainingJobName}
        verb="Stop"
        opened={isAsking}
        onClose={() => setAsking(false)}
        onConfirm={async () => {
          await call('StopTrainingJob', name)
          void client.invalidateQueries()
        }}
      >
        All ranks stop at one agreed step, which is kept in S3. A stopped job does not start again.
      </ConfirmByName>
    </div>
  )
}

/** The first fold of a job as it was told at `at`; `error`: why it was not told since. */
function Fold({ job, at, error }: { job: TrainingJob; at: number; error: unknown }) {
  const now = useNow()
  const staleSeconds = Math.max(useStaleSeconds(), now - at)
  const refusal = error instanceof ApiError && error.status > 0 ? error.message : undefined
  const name = useJobAddress(job)
  const protection = useQuery(protectionQuery(name)).data
  const open = useQuery(openIncidentsQuery).data
  const incidents = useQuery(incidentsQuery(name)).data
  const fleet = useQuery(fleetsQuery).data?.find((each) => each.FleetName === job.FleetName)
  const samples = useMemo(() => {
    const next = sampled(seen.get(job.RunId) ?? [], { at, boundary: job.Boundary })
    seen.set(job.RunId, next)
    return next
  }, [job.RunId, job.Boundary, at])
  const mine = incidents?.filter((each) => each.RunId === job.RunId)
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data // events renew it
  const neighbours = new Set(jobs?.filter((each) => each.FleetName === job.FleetName && each.RunId !== job.RunId).map((each) => each.RunId))
  const othersHit = hitAlike(job, openIncident(mine), open ?? [], neighbours)
  const hasLost = mine?.some((each) => each.InstanceIds?.length) ?? false
  const nodes = useQuery({ ...nodesQuery(job.FleetName), enabled: hasLost }).data
  const told = verdict({ job, protection, incidents: mine, fleet, progress: progressOf(samples, usualRate(job)), othersHit, heldNodes: lostBy(mine ?? [], nodes ?? []), staleSeconds, refusal, now })
  const incident = openIncident(mine) ?? mine?.at(-1)
  const besides = { ...job, Reason: told.waiting ? '' : job.Reason } // what is waited for is said once
  return <FirstFold told={told} incident={incident} answers={incident ? story(incident, besides, now, { nodes, protection, act: told.act }) : []} />
}

function Overview({ job }: { job: TrainingJob }) {
  const now = useNow()
  const name = useJobAddress(job)
  const incidents = useQuery(incidentsQuery(name))
  const nodes = useQuery(jobNodesQuery(name)).data ?? []
  const [minutes, setMinutes] = useState<number>()
  const mine = (incidents.data ?? []).filter((each) => each.RunId === job.RunId)
  const open = openIncident(mine)
  const protection = useQuery(protectionQuery(name)).data
  const figures = jobFigures(job, { protection, staleSeconds: useStaleSeconds() })
  const end = job.TrainingEndTime ?? now
  const wrong = conditionLines(job.Conditions)
  return (
    <div className="stack">
      <section className="card">
        <FactList
          facts={[
            ['Step', shown(figures, 'step'), hook(figures, 'step')],
            ['Progress', <Progress key="progress" figures={figures} />],
            ['Left at its pace', left(job, now)],
            ['Kept in memory', figures.committedStep === undefined ? '–' : `step ${shown(figures, 'committedStep')}`, hook(figures, 'committedStep')],
            ['ETTR', shown(figures, 'ettrRatio'), hook(figures, 'ettrRatio')],
            ['Incidents', `${shown(figures, 'incidents')}${figures.openIncidents ? ', one open' : ''}`, hook(figures, 'incidents')],
            ['Recomputed steps', shown(figures, 'recomputedSteps'), hook(figures, 'recomputedSteps')],
            ['Nodes × ranks', `${count(job.NodeCount)} × ${count(job.RanksPerNode)}`],
            ['Healthy nodes', figures.healthyNodes === undefined ? '–' : `${shown(figures, 'healthyNodes')} of ${shown(figures, 'wantedNodes')}`, hook(figures, 'healthyNodes')],
            ['Cost so far', figures.costUsd === undefined ? 'the fleet has no price' : shown(figures, 'costUsd'), hook(figures, 'costUsd')],
            ['Launch', count(job.Generation)],
            ['Fleet', <Link key="fleet" to={`/fleets/${encodeURIComponent(job.FleetName)}`}>{job.FleetName}</Link>],
            ['Created', <Ago key="created" at={job.CreationTime} />],
            [job.TrainingEndTime === undefined ? 'Running for' : 'Ran for', job.TrainingStartTime === undefined ? '–' : duration(end - job.TrainingStartTime)],
          ]}
        />
      </section>
      {wrong.length > 0 && (
        <section className="card">
          <h2>What is wrong now</h2>
          <FactList facts={wrong.map((line) => [line.title, line.text])} />
        </section>
      )}
      {job.FailureReason?.includes('\n') && (
        <section className="card">
          <h2>Why it failed</h2>
          <LastLines text={job.FailureReason} />
        </section>
      )}
      <section className="card">
        <div className="row between">
          <h2>Recovery timeline</h2>
          <div className="row" role="group" aria-label="Span of the timeline">
            {([[undefined, 'All'], [60, '1 h'], [10, '10 min'], [2, '2 min']] as const).map(([each, label]) => (
              <Button key={label} size="compact-xs" variant={minutes === each ? 'filled' : 'default'} aria-pressed={minutes === each} onClick={() => setMinutes(each)}>
                {label}
              </Button>
            ))}
          </div>
        </div>
        <TimelineChart job={job} incidents={mine} nodes={nodes} now={now} from={minutes === undefined ? undefined : end - minutes * 60} />
      </section>
      <section className="card">
        <h2>Where the time went</h2>
        <WhereTime job={job} now={now} open={open} />
      </section>
      <section className="card">
        <h2>Incidents</h2>
        <Shown query={incidents} rows={2}>
          {() => (mine.length ? <IncidentTable incidents={mine.toReversed()} withJob={false} figuresOf={(each) => incidentFigures(each, now, job, { protection })} /> : <p className="dim">None. What ends a launch of this job would be listed here.</p>)}
        </Shown>
      </section>
      <Suspense fallback={<Loading rows={2} />}>
        <JobPeople job={job} />
      </Suspense>
    </div>
  )
}

