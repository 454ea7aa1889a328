/** All jobs, live; filters and order are in the URL. */
import { Button, Checkbox, Select } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useMemo, useState } from 'react'
import { Link, useSearchParams } from 'react-router'

import { call } from '../api/client'
import { incidentsQuery, jobsQuery, useRole } from '../api/queries'
import type { TrainingJobSummary } from '../contract'
import { count, dollars, duration, headline, percent, plural } from '../model/format'
import { arranged, type Order } from '../model/jobs'
import { isOver } from '../model/verdict'
import { Ago, Empty, Filter, JobLink, Problem, Shown, Status, toneOf, useNow } from '../parts/Basics'
import { ConfirmByName } from '../parts/ConfirmByName'
import { Doing } from '../parts/Doing'

const PAGE = 200
const FIRST = 'everstep jobs submit --name gpt --source-dir examples/char_gpt --entry-point train.py --node-count 4'

export function JobsPage() {
  useDocumentTitle('Jobs, Everstep')
  const query = useQuery(jobsQuery)
  return (
    <div className="stack">
      <h1>Jobs</h1>
      {query.error && query.data !== undefined && <Problem error={query.error} title="The list is not renewed" />}
      <Shown query={query} rows={8}>
        {(jobs) => (jobs.length ? <Table jobs={jobs} /> : <Empty title="No job yet" command={FIRST}>Submit one from the command line, or with the form under Submit.</Empty>)}
      </Shown>
    </div>
  )
}

function Table({ jobs }: { jobs: TrainingJobSummary[] }) {
  const [search, setSearch] = useSearchParams()
  const now = useNow()
  const { mayRun } = useRole()
  const client = useQueryClient()
  const incidents = useQuery(incidentsQuery()).data
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set())
  const [isAsking, setAsking] = useState(false)
  const [shown, setShown] = useState(PAGE)
  const text = search.get('q') ?? ''
  const status = search.get('status') ?? ''
  const fleet = search.get('fleet') ?? ''
  const order = (search.get('sort') ?? 'created') as Order
  const isReversed = search.get('reverse') === '1'
  const set = (key: string, value: string) => {
    const next = new URLSearchParams(search)
    value ? next.set(key, value) : next.delete(key)
    setSearch(next, { replace: true })
  }
  const rows = useMemo(() => arranged(jobs, { text, status, fleet, order, isReversed }), [jobs, text, status, fleet, order, isReversed])
  const statuses = Object.entries(jobs.reduce<Record<string, number>>((counts, job) => ({ ...counts, [job.SecondaryStatus]: (counts[job.SecondaryStatus] ?? 0) + 1 }), {}))
  const open = new Set(incidents?.filter((each) => each.ClosedAt === undefined).map((each) => each.TrainingJobName))
  const incidentCount = incidents?.reduce<Record<string, number>>((counts, each) => ({ ...counts, [each.RunId]: (counts[each.RunId] ?? 0) + 1 }), {})
  const stoppable = rows.filter((job) => chosen.has(job.TrainingJobName) && !isOver(job) && job.TrainingJobStatus !== 'Stopping')
  const isPriced = jobs.some((job) => job.CostUsd !== undefined)
  const head = (key: Order, label: string, isNumber = false) => (
    <th className={isNumber ? 'n' : undefined} aria-sort={order === key ? (isReversed ? 'descending' : 'ascending') : undefined}>
      <button
        type="button"
        onClick={() => {
          const next = new URLSearchParams(search)
          next.set('sort', key)
          order === key && !isReversed ? next.set('reverse', '1') : next.delete('reverse')
          setSearch(next, { replace: true })
        }}
      >
        {label} {order === key ? (isReversed ? '↑' : '↓') : ''}
      </button>
    </th>
  )
  return (
    <>
      <div className="row">
        <Filter label="Filter by name or reason" placeholder="Name or reason  ( / )" value={text} onChange={(value) => set('q', value)} />
        <Select aria-label="Status" placeholder="Any status" clearable w={190} value={status || null} data={statuses.map(([name, number]) => ({ value: name, label: `${name} (${number})` }))} onChange={(value) => set('status', value ?? '')} />
        <Select aria-label="Fleet" placeholder="Any fleet" clearable w={160} value={fleet || null} data={[...new Set(jobs.map((job) => job.FleetName))]} onChange={(value) => set('fleet', value ?? '')} />
        {stoppable.length > 0 && (
          <>
            <Doing
              does={async () => {
                for (const job of stoppable) await call('PauseTrainingJob', { TrainingJobName: job.TrainingJobName })
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
              {head('step', 'Step', true)}
              <th className="n">In memory</th>
              <th className="n">Incidents</th>
              <th className="n" title="Effective training time by wall time, the queue left out">ETTR</th>
              {isPriced && <th className="n">Cost</th>}
              <th className="n">Nodes</th>
              {head('fleet', 'Fleet')}
              <th className="n">Ran for</th>
              {head('created', 'Created')}
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, shown).map((job) => {
              const name = job.TrainingJobName
              const behind = job.Boundary - job.CommittedStep
              return (
                <tr key={job.RunId}>
                  {mayRun && (
                    <td data-name="Choose">
                      {!isOver(job) && (
                        <Checkbox
                          size="xs"
                          aria-label={`Choose ${name}`}
                          checked={chosen.has(name)}
                          onChange={(event) => {
                            const next = new Set(chosen)
                            event.currentTarget.checked ? next.add(name) : next.delete(name)
                            setChosen(next)
                          }}
                        />
                      )}
                    </td>
                  )}
                  <td data-name="Job"><JobLink name={name} /></td>
                  <td data-name="Status"><Status tone={toneOf(job.SecondaryStatus)} word={job.SecondaryStatus} /></td>
                  <td className="reason">{headline(job.Reason)}</td>
                  <td className="n" data-name="Step">{job.Boundary < 0 ? '–' : count(job.Boundary)}</td>
                  <td className="n" data-name="In memory">{isOver(job) || job.CommittedStep < 0 ? '–' : behind > 0 ? `${behind} behind` : 'all'}</td>
                  <td className="n" data-name="Incidents">
                    {open.has(name) ? <Link to={`/incidents?q=${encodeURIComponent(name)}`}><Status tone="warn" word={`${incidentCount?.[job.RunId] ?? 0}, open`} /></Link> : count(incidentCount?.[job.RunId] ?? 0)}
                  </td>
                  <td className="n" data-name="ETTR">{job.EttrRatio === undefined ? '–' : percent(job.EttrRatio)}</td>
                  {isPriced && <td className="n" data-name="Cost">{job.CostUsd === undefined ? '–' : dollars(job.CostUsd)}</td>}
                  <td className="n" data-name="Nodes">{count(job.NodeCount)}</td>
                  <td data-name="Fleet"><Link to={`/fleets/${encodeURIComponent(job.FleetName)}`}>{job.FleetName}</Link></td>
                  <td className="n" data-name="Ran for">{job.TrainingStartTime === undefined ? '–' : duration((job.TrainingEndTime ?? now) - job.TrainingStartTime)}</td>
                  <td data-name="Created"><Ago at={job.CreationTime} /></td>
                </tr>
              )
            })}
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
          for (const job of stoppable) await call('StopTrainingJob', { TrainingJobName: job.TrainingJobName })
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

