/** The Overview tab of a job: what to do, figures, the newest incident, the timeline, and where the time went. */
import { Button } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'

import { useJobAddress } from '../api/addresses'
import { lazyWith } from '../api/pages'
import { jobNodesQuery, timeSpansQuery } from '../api/queries'
import { TimelineChart } from '../charts/Timeline'
import { WhereTime } from '../charts/WhereTime'
import type { TrainingJob } from '../contract'
import { conditionLines } from '../model/conditions'
import { resubmission } from '../model/duty'
import { hook, incidentFigures, shown } from '../model/figures'
import { count, duration } from '../model/format'
import { isRecent } from '../model/incident'
import { remainingWords } from '../model/progress'
import { resumeWords } from '../model/rehearsal'
import { openIncident, rateWords } from '../model/verdict'
import { ActCard } from '../parts/ActCard'
import { Ago, FactList, FleetLink, Loading, Status, ToneIcon, useIsStale, useNow, type Fact } from '../parts/Basics'
import { Card } from '../parts/Card'
import { IncidentTable } from '../parts/IncidentTable'
import { LastLines } from '../parts/LastLines'
import { LatestIncident } from '../parts/LatestIncident'
import { Progress } from '../parts/Progress'
import { JOB, RESUME } from '../words/job'
import { TIMELINE } from '../words/jobTabs'
import type { JobVerdict } from './useVerdict'

const JobPeople = lazyWith(
  () => import('../parts/JobPeople'),
  () => <Loading rows={2} />,
)

export default function JobOverview({ job, known }: { job: TrainingJob; known: JobVerdict }) {
  const now = useNow()
  const isStale = useIsStale()
  const { verdict, protection, incidents, incident } = known
  const problems = conditionLines(job.Conditions)
  const { duty, banners, figures } = verdict
  const isFirst = incident !== undefined && isRecent(incident, now)
  const latest = incident && (
    <LatestIncident
      incident={incident}
      figures={incidentFigures(incident, now, job, { protection, isStale })}
      job={job}
    />
  )
  const again = protection && duty.Kind === 'JobFailed' ? resubmission(job, figures.checkpointStep) : undefined
  const toDo = <ActCard duty={duty} figures={figures} runId={job.RunId} fleet={job.FleetName} again={again} />
  const traceback = job.FailureReason?.includes('\n') ? job.FailureReason : undefined
  return (
    <div className="stack">
      {banners.map((banner) => (
        <div key={banner.title} className={`banner tone-${banner.tone}`} role="status">
          <ToneIcon tone={banner.tone} />
          <span>
            <strong>{banner.title}.</strong> {banner.text}
          </span>
        </div>
      ))}
      {isFirst ? (
        <div className="incident">
          {latest}
          {toDo}
        </div>
      ) : (
        duty.Kind !== 'Nothing' && toDo
      )}
      <Card label={JOB.figures.title}>
        <FactList facts={factsOf(job, known, now)} />
      </Card>
      {problems.length > 0 && (
        <Card title={JOB.conditions}>
          <FactList facts={problems.map((line) => [line.title, line.text])} />
        </Card>
      )}
      {!isFirst && latest}
      {traceback && (
        <Card title={JOB.whyFailed}>
          <LastLines text={traceback} />
        </Card>
      )}
      <JobTimeline job={job} known={known} now={now} />
      <Card title={JOB.timeTitle}>
        <WhereTime job={job} now={now} open={openIncident(incidents)} />
      </Card>
      {incidents.length > 1 && (
        <Card title={JOB.incidents} isFlush>
          <IncidentTable
            incidents={incidents.toReversed()}
            withJob={false}
            figuresOf={(each) => incidentFigures(each, now, job, { protection, isStale })}
          />
        </Card>
      )}
      <JobPeople job={job} />
    </div>
  )
}

function factsOf(job: TrainingJob, { verdict, progress }: JobVerdict, now: number): Fact[] {
  const { figures } = verdict
  const words = JOB.figures
  const rate = job.SecondaryStatus === 'Training' ? (progress?.rate ?? progress?.usualRate) : undefined
  const end = job.TrainingEndTime ?? now
  const step = (field: 'committedStep' | 'checkpointStep', absent: string) =>
    figures[field] === undefined ? absent : words.step(shown(figures, field))
  const open = figures.openIncidents ? `, ${words.open(shown(figures, 'openIncidents'))}` : ''
  const healthy = words.of(shown(figures, 'healthyNodes'), shown(figures, 'wantedNodes'))
  const pace: Fact[] = [
    [words.rate, rate ? rateWords(rate) : '–'],
    [words.remaining, remainingWords(job, now)],
  ]
  const memory: Fact[] = [
    [words.nodes, figures.healthyNodes === undefined ? '–' : healthy, hook(figures, 'healthyNodes')],
  ]
  const lost: Fact[] =
    figures.unsavedSteps === undefined
      ? []
      : [[words.unsaved, shown(figures, 'unsavedSteps'), hook(figures, 'unsavedSteps'), words.unsavedNote]]
  const protection = <Status key="safe" tone={figures.protectionTone} word={figures.protection} />
  const resume = resumeWords(job)
  const ran = job.TrainingStartTime === undefined ? '–' : duration(end - job.TrainingStartTime)
  return [
    [words.progress, <Progress key="progress" figures={figures} />],
    ...(figures.isOver ? [] : pace),
    [words.runtime(figures.isOver), ran],
    [words.ettr, shown(figures, 'ettrRatio'), hook(figures, 'ettrRatio'), words.ettrNote],
    [words.cost, figures.costUsd === undefined ? words.noPrice : shown(figures, 'costUsd'), hook(figures, 'costUsd')],
    [words.protection, protection, hook(figures, 'protection'), verdict.protection.text],
    [words.memory, step('committedStep', '–'), hook(figures, 'committedStep'), words.memoryNote],
    [words.checkpoint, step('checkpointStep', words.none), hook(figures, 'checkpointStep')],
    ...(figures.isOver ? [] : memory),
    [words.recomputed, shown(figures, 'recomputedSteps'), hook(figures, 'recomputedSteps'), words.recomputedNote],
    ...lost,
    ...(resume === undefined ? [] : [[RESUME.label, resume] satisfies Fact]),
    [words.incidents, `${shown(figures, 'incidents')}${open}`, hook(figures, 'incidents'), words.incidentsNote],
    [words.ranks, `${count(job.NodeCount)} × ${count(job.RanksPerNode)}`],
    [words.fleet, <FleetLink key="fleet" name={job.FleetName} />],
    [words.launches, count(job.Generation)],
    [words.created, <Ago key="created" at={job.CreationTime} />],
  ]
}

const RANGES = [
  [undefined, TIMELINE.all],
  [60, '1 h'],
  [10, '10 min'],
  [2, '2 min'],
] as const

function JobTimeline({ job, known: { incidents }, now }: { job: TrainingJob; known: JobVerdict; now: number }) {
  const address = useJobAddress(job)
  const nodes = useQuery(jobNodesQuery(address)).data ?? []
  const spans = useQuery(timeSpansQuery(address)).data ?? []
  const [minutes, setMinutes] = useState<number>()
  const end = job.TrainingEndTime ?? now
  const ranges = (
    <div className="row" role="group" aria-label={TIMELINE.span}>
      {RANGES.map(([each, label]) => (
        <Button
          key={label}
          size="compact-sm"
          variant={minutes === each ? 'filled' : 'default'}
          aria-pressed={minutes === each}
          onClick={() => setMinutes(each)}
        >
          {label}
        </Button>
      ))}
    </div>
  )
  return (
    <Card title={TIMELINE.title} actions={ranges}>
      <TimelineChart
        job={job}
        incidents={incidents}
        spans={spans}
        nodes={nodes}
        now={now}
        from={minutes === undefined ? undefined : end - minutes * 60}
      />
    </Card>
  )
}
