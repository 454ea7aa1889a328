/** One job. The Overview tab begins with the verdict (the job's state, what to do). Other tabs show it in one line. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Suspense } from 'react'
import { Link, NavLink, useParams } from 'react-router'

import { call } from '../api/client'
import { lazyPart } from '../api/pages'
import { jobQuery, useRole } from '../api/queries'
import type { TrainingJob } from '../contract'
import { statementHook } from '../model/figures'
import { isOver, statusOf } from '../model/standing'
import { rateWords } from '../model/verdict'
import { ActionButton } from '../parts/ActionButton'
import { Empty, Loading, Shown, Status } from '../parts/Basics'
import { ConfirmButton } from '../parts/ConfirmButton'
import { JobButtons } from '../parts/JobButtons'
import { PageHead } from '../parts/PageHead'
import { StatusStrip } from '../parts/StatusStrip'
import { JOB } from '../words/job'
import { useVerdict, type JobVerdict } from './useVerdict'

const JobOverview = lazyPart(() => import('./JobOverview'))
const CheckpointsTab = lazyPart(() => import('./JobCheckpoints'))
const EventsTab = lazyPart(async () => ({ default: (await import('./JobTabs')).EventsTab }))
const ProtectionTab = lazyPart(async () => ({ default: (await import('./JobTabs')).ProtectionTab }))
const LogsTab = lazyPart(() => import('./JobLogs'))
const SpecTab = lazyPart(() => import('./JobSpec'))
const MetricsTab = lazyPart(() => import('./JobMetrics'))
const OutputsTab = lazyPart(() => import('./JobOutputs'))
const TABS = ['overview', 'metrics', 'logs', 'protection', 'checkpoints', 'outputs', 'events', 'spec'] as const

export default function JobPage() {
  const { name = '' } = useParams()
  const query = useQuery(jobQuery(name))
  const job = query.data
  useDocumentTitle(
    job ? `${statusOf(job.SecondaryStatus).word}: ${job.TrainingJobName}, Everstep` : `${name}, Everstep`,
  )
  return (
    <Shown query={query} rows={8}>
      {(data) => <Sections job={data} dataUpdatedAt={query.dataUpdatedAt} error={query.error} />}
    </Shown>
  )
}

function Sections({ job, dataUpdatedAt, error }: { job: TrainingJob; dataUpdatedAt: number; error: unknown }) {
  const { tab = 'overview' } = useParams()
  const known = useVerdict(job, dataUpdatedAt, error)
  const rate = known.progress?.rate ?? known.progress?.usualRate
  const isTraining = job.SecondaryStatus === 'Training'
  return (
    <div className={`stack job${tab === 'overview' ? '' : ' has-strip'}`}>
      {tab === 'overview' ? (
        <JobHead job={job} known={known} />
      ) : (
        <StatusStrip
          name={job.TrainingJobName}
          verdict={known.verdict}
          rate={isTraining && rate ? rateWords(rate) : undefined}
        />
      )}
      <Tabs />
      <Suspense fallback={<Loading />}>
        <Tab tab={tab} job={job} known={known} />
      </Suspense>
    </div>
  )
}

function Tabs() {
  const { name = '' } = useParams()
  const path = `/jobs/${encodeURIComponent(name)}`
  return (
    <nav className="tabs" aria-label={JOB.tabsLabel}>
      {TABS.map((each) => (
        <NavLink key={each} to={each === 'overview' ? path : `${path}/${each}`} end preventScrollReset>
          {JOB.tabs[each]}
        </NavLink>
      ))}
    </nav>
  )
}

function Tab({ tab, job, known }: { tab: string; job: TrainingJob; known: JobVerdict }) {
  switch (tab) {
    case 'overview':
      return <JobOverview job={job} known={known} />
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
      return <Empty title={JOB.noTab} />
  }
}

function JobHead({ job, known: { verdict } }: { job: TrainingJob; known: JobVerdict }) {
  const { state, figures } = verdict
  const { mayRun } = useRole()
  const crumbs = (
    <>
      <Link to="/jobs">{JOB.crumb}</Link>
      {job.Project && ` / ${JOB.project(job.Project)}`}
    </>
  )
  const status = (
    <span {...statementHook(figures, 'moving', state)}>
      <Status tone={state.tone} word={state.title} title={job.Reason} />
    </span>
  )
  const canAct = mayRun && !isOver(job) && job.TrainingJobStatus !== 'Stopping'
  const actions = (
    <>
      <JobButtons job={job} />
      {canAct && <JobActions job={job} />}
    </>
  )
  const title = job.TrainingJobName
  return <PageHead crumbs={crumbs} title={title} status={status} actions={actions} verdict={verdict.line} />
}

function JobActions({ job }: { job: TrainingJob }) {
  const words = JOB.actions
  const name = { TrainingJobName: job.RunId }
  const button = (operation: JobOperation, text: string, title: string) => (
    <ActionButton operation={operation} action={() => call(operation, name)} title={title}>
      {text}
    </ActionButton>
  )
  return (
    <div className="row" role="group" aria-label={words.label}>
      {job.TakenOverTime === undefined
        ? button('TakeOverTrainingJob', words.takeOver, words.takeOverTitle)
        : button('HandBackTrainingJob', words.handBack, words.handBackTitle(job.TakenOverBy ?? ''))}
      {job.PauseRequestedTime === undefined
        ? button('PauseTrainingJob', words.pause, words.pauseTitle)
        : button('ResumeTrainingJob', words.resume, words.resumeTitle)}
      <ConfirmButton name={job.TrainingJobName} verb={words.stop} onConfirm={() => call('StopTrainingJob', name)}>
        {words.stopText}
      </ConfirmButton>
    </div>
  )
}
type JobOperation = 'TakeOverTrainingJob' | 'HandBackTrainingJob' | 'PauseTrainingJob' | 'ResumeTrainingJob'
