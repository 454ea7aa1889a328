/** One row of the list of jobs; on a phone, one card. It renders again only when its own job changes. */
import { memo, type ReactNode } from 'react'
import { Link } from 'react-router'

import { Sparkline } from '../charts/Sparkline'
import type { TrainingJobSummary } from '../contract'
import { isPressing } from '../model/duty'
import { dutyHook, hook, jobFigures, shown, type JobFigures } from '../model/figures'
import { count, duration, headline } from '../model/format'
import type { Column } from '../model/jobs'
import { isOver } from '../model/standing'
import { toneOfDuty } from '../words/duty'
import { JOBS } from '../words/jobs'
import { Ago, FleetLink, JobLink, Lasting, Status, ToneIcon, useIsStale } from './Basics'
import { Progress } from './Progress'

interface Props {
  job: TrainingJobSummary
  /** Place in the list, from 0. */
  index: number
  address: string
  columns: readonly Column[]
  /** Values of the loss; undefined until they have arrived. */
  curve?: readonly (number | null)[]
  isChosen: boolean
  /** Absent for a viewer, who has no check boxes. */
  onChoose?: (run: string, isChosen: boolean) => void
}

export const JobRow = memo(function JobRow({ job, index, address, columns, curve, isChosen, onChoose }: Props) {
  const name = job.TrainingJobName
  const figures = jobFigures(job, { isStale: useIsStale() })
  return (
    <tr aria-rowindex={index + 2}>
      {onChoose && (
        <td className="c-choose">
          {!isOver(job) && (
            <input
              type="checkbox"
              aria-label={JOBS.choose(name)}
              checked={isChosen}
              onChange={(event) => onChoose(job.RunId, event.currentTarget.checked)}
            />
          )}
        </td>
      )}
      {columns.map((column) => (
        <Cell key={column} column={column} job={job} figures={figures} address={address} curve={curve} />
      ))}
    </tr>
  )
})

interface CellProps {
  column: Column
  job: TrainingJobSummary
  figures: JobFigures
  address: string
  curve?: readonly (number | null)[]
}

function Cell({ column, job, figures, address, curve }: CellProps) {
  const cell = (content: ReactNode, attributes: object = {}, isNumber = false) => (
    <td className={`c-${column}${isNumber ? ' n' : ''}`} data-name={JOBS.columns[column].label} {...attributes}>
      {content}
    </td>
  )
  switch (column) {
    case 'name':
      return cell(<JobLink name={job.TrainingJobName} address={address} />, { title: job.TrainingJobName })
    case 'status':
      return cell(<JobStatus job={job} figures={figures} />)
    case 'reason':
      return cell(headline(job.Reason), { title: job.Reason })
    case 'progress':
      return cell(<Progress figures={figures} />)
    case 'loss':
      return cell(<LossCell curve={curve} />)
    case 'left': {
      const seconds = job.EstimatedRemainingSeconds
      return cell(seconds === undefined ? '–' : duration(seconds), {}, true)
    }
    case 'protection': {
      const committed = JOBS.committed(shown(figures, 'committedStep'))
      const badge = <Status tone={figures.protectionTone} word={figures.protection} title={committed} />
      return cell(badge, hook(figures, 'protection'))
    }
    case 'nodes':
      return cell(<Nodes figures={figures} />, {}, true)
    case 'incidents':
      return cell(<Incidents figures={figures} name={job.TrainingJobName} />, hook(figures, 'incidents'), true)
    case 'ettr':
      return cell(shown(figures, 'ettrRatio'), hook(figures, 'ettrRatio'), true)
    case 'cost':
      return cell(shown(figures, 'costUsd'), hook(figures, 'costUsd'), true)
    case 'fleet':
      return cell(<FleetLink name={job.FleetName} />)
    case 'project':
      return cell(job.Project)
    case 'priority':
      return cell(count(job.Priority), {}, true)
    case 'duration':
      return cell(<Lasting from={job.TrainingStartTime} to={job.TrainingEndTime} />, {}, true)
    case 'created':
      return cell(<Ago at={job.CreationTime} />)
  }
}

/** A job's status. A job that needs a person has the sentence of its duty beside it. */
function JobStatus({ job: { Duty: duty }, figures }: { job: TrainingJobSummary; figures: JobFigures }) {
  return (
    <>
      <span {...hook(figures, 'status')}>
        <Status tone={figures.statusTone} word={figures.status} />
      </span>
      {duty && isPressing(duty) && (
        <span className={`tone-text tone-${toneOfDuty(duty)}`} title={duty.Sentence} {...dutyHook(figures, duty)}>
          <ToneIcon tone={toneOfDuty(duty)} size={13} />
          <span className="visually-hidden">{duty.Sentence}</span>
        </span>
      )}
    </>
  )
}

/** The cell with the loss curve. It has its full size before the values arrive, so that the row does not move. */
function LossCell({ curve }: { curve?: readonly (number | null)[] }) {
  const known = (curve ?? []).filter((value) => value !== null)
  if (known.length < 2) return <span className="dim nospark">{curve === undefined ? '' : '–'}</span>
  const [first, last] = [known[0]!, known.at(-1)!].map((value) => value.toPrecision(3)) as [string, string]
  return <Sparkline values={curve!} label={JOBS.loss(first, last)} />
}

function Nodes({ figures }: { figures: JobFigures }) {
  const wanted = <span {...hook(figures, 'wantedNodes')}>{shown(figures, 'wantedNodes')}</span>
  if (figures.healthyNodes === undefined) return wanted
  return (
    <span className={figures.healthyNodesTone === 'warn' ? 'tone-text tone-warn' : undefined}>
      <span {...hook(figures, 'healthyNodes')}>{shown(figures, 'healthyNodes')}</span> of {wanted}
    </span>
  )
}

function Incidents({ figures, name }: { figures: JobFigures; name: string }) {
  const number = shown(figures, 'incidents')
  if (!figures.openIncidents) return number
  return (
    <Link to={`/incidents?q=${encodeURIComponent(name)}`}>
      <Status tone="warn" word={JOBS.openIncidents(number)} />
    </Link>
  )
}
