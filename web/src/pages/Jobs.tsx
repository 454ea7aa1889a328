/** All jobs, live; filters and order are in the URL. */
import { Button, NativeSelect } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { memo, useCallback, useMemo, useState } from 'react'
import { Link } from 'react-router'

import { call } from '../api/client'
import { jobsQuery, useRole } from '../api/queries'
import type { TrainingJobSummary } from '../contract'
import { count, duration, headline, plural } from '../model/format'
import { addressesOf, arranged, type Order } from '../model/jobs'
import { hook, jobFigures, shown, type JobFigures } from '../model/figures'
import { isOver } from '../model/verdict'
import { Ago, Empty, Filter, JobLink, Lasting, Shown, Status, useIsStale } from '../parts/Basics'
import { ConfirmByName } from '../parts/ConfirmByName'
import { Doing } from '../parts/Doing'
import { Progress } from '../parts/Progress'
import { useAddress } from '../parts/address'
import { FIRST_COMMAND } from '../words/commands'

const PAGE = 200

export default function JobsPage() {
  useDocumentTitle('Jobs, Everstep')
  const query = useQuery(jobsQuery)
  return (
    <div className="stack">
      <h1>Jobs</h1>
      <Shown query={query} rows={8}>
        {(jobs) => (jobs.length ? <Table jobs={jobs} /> : <Empty title="No job yet" command={FIRST_COMMAND}>Submit one from the command line, or with the form under Submit.</Empty>)}
      </Shown>
    </div>
  )
}

function Table({ jobs }: { jobs: TrainingJobSummary[] }) {
  const [search, set] = useAddress()
  const { mayRun } = useRole()
  const client = useQueryClient()
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set())
  const [isAsking, setAsking] = useState(false)
  const [shown, setShown] = useState(PAGE)
  const text = search.get('q') ?? ''
  const status = search.get('status') ?? ''
  const fleet = search.get('fleet') ?? ''
  const order = (search.get('sort') ?? 'created') as Order
  const isReversed = search.get('reverse') === '1'
  const addressOf = useMemo(() => addressesOf(jobs), [jobs])
  const rows = useMemo(() => arranged(jobs, { text, status, fleet, order, isReversed }), [jobs, text, status, fleet, order, isReversed])
  const statuses = Object.entries(jobs.reduce<Record<string, number>>((counts, job) => ({ ...counts, [job.SecondaryStatus]: (counts[job.SecondaryStatus] ?? 0) + 1 }), {}))
  const stoppable = rows.filter((job) => chosen.has(job.RunId) && !isOver(job) && job.TrainingJobStatus !== 'Stopping')
  const choose = useCallback((run: string, isChosen: boolean) => setChosen((before) => new Set(isChosen ? [...before, run] : [...before].filter((each) => each !== run))), [])
  const isPriced = jobs.some((job) => job.CostUsd !== undefined)
  const head = (key: Order, label: string, isNumber = false, title?: string) => (
    <th title={title} className={isNumber ? 'n' : undefined} aria-sort={order === key ? (isReversed ? 'descending' : 'ascending') : undefined}>
      <button
        type="button"
        onClick={() => set({ sort: key, reverse: order === key && !isReversed ? '1' : '' })}
      >
        {label} {order === key ? (isReversed ? '↑' : '↓') : ''}
      </button>
    </th>
  )
  return (
    <>
      <div className="row">
        <Filter label="Filter by name or reason" placeholder="Name or reason  ( / )" value={text} onChange={(value) => set({ q: value })} />
        <NativeSelect aria-label="Status" value={status} data={[{ value: '', label: 'Any status' }, ...statuses.map(([name, number]) => ({ value: name, label: `${name} (${number})` }))]} onChange={(event) => set({ status: event.currentTarget.value })} />
        <NativeSelect aria-label="Fleet" value={fleet} data={[{ value: '', label: 'Any fleet' }, ...new Set(jobs.map((job) => job.FleetName))]} onChange={(event) => set({ fleet: event.currentTarget.value })} />
        {stoppable.length > 0 && (
          <>
            <Doing
              does={async () => {
                for (const job of stoppable) await call('PauseTrainingJob', { TrainingJobName: job.RunId })
                setChosen(new Set())
              }}
            >
              Pause {plural(stoppable.length, 'job')}
            </Doing>
            <Button color="red" variant="outline" size="xs" onClick={() => setAsking(true)}>
              Stop {plural(stoppable.length, 'job')}
            </Button>
          </>
        )}
        <span className="dim">{rows.length === jobs.length ? plural(jobs.length, 'job') : `${count(rows.length)} of ${plural(jobs.length, 'job')}`}</span>
      </div>
      <section className="card scroll" style={{ padding: '4px 8px' }}>
        <table className="grid stacked">
          <thead>
            <tr>
              {mayRun && <th><span className="visually-hidden">Choose</span></th>}
              {head('name', 'Job')}
              {head('status', 'Status')}
              <th>Reason</th>
              {head('step', 'Progress', true)}
              {head('left', 'Left', true, 'How long the rest takes at the mean pace so far, without failures and waiting')}
              <th>Protection</th>
              <th className="n">Incidents</th>
              {head('ettr', 'ETTR', true, 'Time in training by the time since it was first started, the queue left out')}
              {isPriced && head('cost', 'Cost', true)}
              {head('nodes', 'Nodes', true, 'Nodes that are connected and report no fault, of those that the job asks for')}
              {head('fleet', 'Fleet')}
              <th className="n">Ran for</th>
              {head('created', 'Created')}
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, shown).map((job) => (
              <Row
                key={job.RunId}
                job={job}
                address={addressOf(job)}
                isChosen={chosen.has(job.RunId)}
                onChoose={mayRun ? choose : undefined}
                isPriced={isPriced}
              />
            ))}
          </tbody>
        </table>
        {!rows.length && <p className="dim" style={{ padding: 12 }}>No job is like that.</p>}
      </section>
      {rows.length > shown && (
        <Button variant="default" onClick={() => setShown(shown + PAGE)}>
          Show {count(Math.min(PAGE, rows.length - shown))} more of {count(rows.length)}
        </Button>
      )}
      <ConfirmByName
        name={stoppable.length === 1 ? stoppable[0]!.TrainingJobName : `${stoppable.length} jobs`}
        verb="Stop"
        opened={isAsking}
        onClose={() => setAsking(false)}
        onConfirm={async () => {
          for (const job of stoppable) await call('StopTrainingJob', { TrainingJobName: job.RunId })
          setChosen(new Set())
          void client.invalidateQueries()
        }}
      >
        <p>{stoppable.map((job) => job.TrainingJobName).join(', ')}</p>
        <p>All ranks stop at one agreed step, which is kept in S3. A stopped job does not start again.</p>
      </ConfirmByName>
    </>
  )
}


interface Shows {
  job: TrainingJobSummary
  address: string
  isChosen: boolean
  /** Absent for whom it is not allowed. */
  onChoose?: (run: string, isChosen: boolean) => void
  isPriced: boolean
}

/** Drawn anew when its own job has changed, not whenever the list is renewed: there may be a thousand. */
const Row = memo(function Row({ job, address, isChosen, onChoose, isPriced }: Shows) {
  const name = job.TrainingJobName
  const isStale = useIsStale()
  const figures = jobFigures(job, { staleSeconds: isStale ? Infinity : 0 })
  return (
    <tr>
      {onChoose && (
        <td data-name="Choose">{!isOver(job) && <input type="checkbox" aria-label={`Choose ${name}`} checked={isChosen} onChange={(event) => onChoose(job.RunId, event.currentTarget.checked)} />}</td>
      )}
      <td data-name="Job"><JobLink name={name} address={address} /></td>
      <td data-name="Status" {...hook(figures, 'status')}><Status tone={figures.statusTone} word={figures.status} /></td>
      <td className="reason">
        <div className="clamp" title={job.Reason}>
          {headline(job.Reason)}
        </div>
      </td>
      <td className="n" data-name="Progress"><Progress figures={figures} /></td>
      <td className="n" data-name="Left">{job.EstimatedRemainingSeconds === undefined ? '–' : duration(job.EstimatedRemainingSeconds)}</td>
      <td data-name="Protection" {...hook(figures, 'protection')}>
        <Status tone={figures.protectionTone} word={figures.protection} title={`Committed step: ${shown(figures, 'committedStep')}`} />
      </td>
      <td className="n" data-name="Incidents" {...hook(figures, 'incidents')}>
        {figures.openIncidents ? <Link to={`/incidents?q=${encodeURIComponent(name)}`}><Status tone="warn" word={`${shown(figures, 'incidents')}, open`} /></Link> : shown(figures, 'incidents')}
      </td>
      <td className="n" data-name="ETTR" {...hook(figures, 'ettrRatio')}>{shown(figures, 'ettrRatio')}</td>
      {isPriced && <td className="n" data-name="Cost" {...hook(figures, 'costUsd')}>{shown(figures, 'costUsd')}</td>}
      <td className="n" data-name="Nodes"><Nodes figures={figures} /></td>
      <td data-name="Fleet"><Link to={`/fleets/${encodeURIComponent(job.FleetName)}`}>{job.FleetName}</Link></td>
      <td className="n" data-name="Ran for"><Lasting from={job.TrainingStartTime} to={job.TrainingEndTime} /></td>
      <td className="moment" data-name="Created"><Ago at={job.CreationTime} /></td>
    </tr>
  )
})

function Nodes({ figures }: { figures: JobFigures }) {
  const wanted = <span {...hook(figures, 'wantedNodes')}>{shown(figures, 'wantedNodes')}</span>
  if (figures.healthyNodes === undefined) return wanted
  const healthy = <span {...hook(figures, 'healthyNodes')}>{shown(figures, 'healthyNodes')}</span>
  return <span className={figures.healthyNodesTone === 'warn' ? 'tone-warn' : undefined}>{healthy} of {wanted}</span>
}
