/** The Overview tab of a job: what to do, figures, the newest incident, the timeline, and where the time went. */
import { Button } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { Suspense, useState } from 'react'
import { Link } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { part } from '../api/pages'
import { jobNodesQuery } from '../api/queries'
import { TimelineChart } from '../charts/Timeline'
import { WhereTime } from '../charts/WhereTime'
import type { TrainingJob } from '../contract'
import { conditionLines } from '../model/conditions'
import { hook, incidentFigures, shown } from '../model/figures'
import { count, duration } from '../model/format'
import { story } from '../model/incident'
import { survivesOneLoss } from '../model/matrix'
import { remainingWords } from '../model/progress'
import { openIncident, rateWords } from '../model/verdict'
import { ActCard } from '../parts/ActCard'
import { Ago, FactList, Loading, Status, ToneIcon, useNow, type Fact } from '../parts/Basics'
import { Card } from '../parts/Card'
import { IncidentTable } from '../parts/IncidentTable'
import { LastLines } from '../parts/LastLines'
import { LatestIncident } from '../parts/LatestIncident'
import { Progress } from '../parts/Progress'
import { JOB } from '../words/job'
import { TIMELINE } from '../words/jobTabs'
import type { JobVerdict } from './useVerdict'

const JobPeople = part(() => import('../parts/JobPeople'))

/** For this long after its end, an incident stands above the figures, as an open one does. */
const RECENT_SECONDS = 900

export default function JobOverview({ job, known }: { job: TrainingJob; known: JobVerdict }) {
  const now = useNow()
  const { verdict, protection, incidents, incident, nodes } = known
  const problems = conditionLines(job.Conditions)
  const { act, banners, figures } = verdict
  const isRecent = now - (incident?.ClosedAt ?? now) < RECENT_SECONDS
  const latest = incident && (
    <LatestIncident incident={incident} answers={story(incident, job, now, { nodes, protection, act: verdict.act })} />
  )
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
      {(act.needed || act.steps.length > 0) && <ActCard act={act} figures={figures} />}
      {isRecent && latest}
      <Card label={JOB.figures.title}>
        <FactList facts={factsOf(job, known, now)} />
      </Card>
      {problems.length > 0 && (
        <Card title={JOB.conditions}>
          <FactList facts={problems.map((line) => [line.title, line.text])} />
        </Card>
      )}
      {!isRecent && latest}
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
            figuresOf={(each) => incidentFigures(each, now, job, { protection })}
          />
        </Card>
      )}
      <Suspense fallback={<Loading rows={2} />}>
        <JobPeople job={job} />
      </Suspense>
    </div>
  )
}

function factsOf(job: TrainingJob, { verdict: { figures }, progress, protection }: JobVerdict, now: number): Fact[] {
  const words = JOB.figures
  const rate = job.SecondaryStatus === 'Training' ? (progress?.rate ?? progress?.usualRate) : undefined
  const survives = protection && survivesOneLoss(protection, figures.protection)
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
    [words.survives, survives === undefined ? '–' : survives ? words.yes : words.no],
    [words.nodes, figures.healthyNodes === undefined ? '–' : healthy, hook(figures, 'healthyNodes')],
  ]
  const ran = job.TrainingStartTime === undefined ? '–' : duration(end - job.TrainingStartTime)
  return [
    [words.progress, <Progress key="progress" figures={figures} />],
    ...(figures.isOver ? [] : pace),
    [words.runtime(figures.isOver), ran],
    [words.ettr, <span key="ettr" title={words.ettrTitle}>{shown(figures, 'ettrRatio')}</span>, hook(figures, 'ettrRatio')],
    [words.cost, figures.costUsd === undefined ? words.noPrice : shown(figures, 'costUsd'), hook(figures, 'costUsd')],
    [words.protection, <Status key="safe" tone={figures.protectionTone} word={figures.protection} />, hook(figures, 'protection')],
    [words.memory, step('committedStep', '–'), hook(figures, 'committedStep')],
    [words.checkpoint, step('checkpointStep', words.none), hook(figures, 'checkpointStep')],
    ...(figures.isOver ? [] : memory),
    [words.recomputed, shown(figures, 'recomputedSteps'), hook(figures, 'recomputedSteps')],
    [words.incidents, `${shown(figures, 'incidents')}${open}`, hook(figures, 'incidents')],
    [words.ranks, `${count(job.NodeCount)} × ${count(job.RanksPerNode)}`],
    [words.fleet, <Link key="fleet" to={`/fleets/${encodeURIComponent(job.FleetName)}`}>{job.FleetName}</Link>],
    [words.launch, count(job.Generation)],
    [words.created, <Ago key="created" at={job.CreationTime} />],
  ]
}

const RANGES = [[undefined, TIMELINE.all], [60, '1 h'], [10, '10 min'], [2, '2 min']] as const

function JobTimeline({ job, known: { incidents }, now }: { job: TrainingJob; known: JobVerdict; now: number }) {
  const nodes = useQuery(jobNodesQuery(useJobAddress(job))).data ?? []
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
        nodes={nodes}
        now={now}
        from={minutes === undefined ? undefined : end - minutes * 60}
      />
    </Card>
  )
}
