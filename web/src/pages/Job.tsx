/** One job. The Overview tab begins with the verdict (the job's state, what to do). Other tabs show it in one line. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Suspense, type ComponentType } from 'react'
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

const TABS = {
  overview: lazyPart(() => import('./JobOverview')),
  metrics: lazyPart(() => import('./JobMetrics')),
  logs: lazyPart(() => import('./JobLogs')),
  protection: lazyPart(async () => ({ default: (await import('./JobTabs')).ProtectionTab })),
  checkpoints: lazyPart(() => import('./JobCheckpoints')),
  outputs: lazyPart(() => import('./JobOutputs')),
  events: lazyPart(async () => ({ default: (await import('./JobTabs')).EventsTab })),
  spec: lazyPart(() => import('./JobSpec')),
}
const NAMES = Object.keys(TABS) as (keyof typeof TABS)[]

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
  const name = NAMES.find((each) => each === tab)
  const Part: ComponentType<{ job: TrainingJob; known: JobVerdict }> | undefined = name && TABS[name]
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
        {Part ? <Part job={job} known={known} /> : <Empty title={JOB.noTab} />}
      </Suspense>
    </div>
  )
}

function Tabs() {
  const { name = '' } = useParams()
  const path = `/jobs/${encodeURIComponent(name)}`
  return (
    <nav className="tabs" aria-label={JOB.tabsLabel}>
      {NAMES.map((each) => (
        <NavLink key={each} to={each === 'overview' ? path : `${path}/${each}`} end preventScrollReset>
          {JOB.tabs[each]}
        </NavLink>
      ))}
    </nav>
  )
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
