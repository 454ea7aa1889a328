/** The list of all jobs, the most urgent first. The URL contains the filters, the sort order and the columns. */
import { Button, NativeSelect } from '@mantine/core'
import { useMediaQuery } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { useCallback, useMemo, useRef, useState } from 'react'
import { Link } from 'react-router'

import { call } from '../api/client'
import { useLossCurves } from '../api/lossCurves'
import { lazyWith } from '../api/pages'
import { jobsQuery, useRole } from '../api/queries'
import type { TrainingJobSummary } from '../contract'
import { count } from '../model/format'
import {
  addressesOf,
  arranged,
  columnsOf,
  columnsText,
  groupCounts,
  jobsByStatus,
  orderOf,
  orderOfColumn,
  type Column,
  type Order,
} from '../model/jobs'
import { isOver, type VerdictLine } from '../model/standing'
import { Empty, Filter, Shown, ToneIcon } from '../parts/Basics'
import { ConfirmButton } from '../parts/ConfirmButton'
import { ActionButton } from '../parts/ActionButton'
import { JobRow } from '../parts/JobRow'
import { Page } from '../parts/PageHead'
import { useAddress, type SetAddress } from '../parts/address'
import { useVisibleRows } from '../parts/visibleRows'
import { FIRST_COMMAND } from '../words/commands'
import { JOBS } from '../words/jobs'
import '../styles/jobs.css'

const ColumnsMenu = lazyWith(
  () => import('../parts/ColumnsMenu'),
  ({ children }) => children,
)
const ViewsMenu = lazyWith(
  () => import('../parts/ViewsMenu'),
  ({ children }) => children,
)

/** Heights in pixels of a table row, and of a card on a phone. `jobs.css` sets the same heights. */
const ROW_HEIGHT = 44
const CARD_HEIGHT = 116

export default function JobsPage() {
  const query = useQuery(jobsQuery)
  const { mayRun } = useRole()
  const submit = mayRun && (
    <Button component={Link} to="/submit" size="xs">
      {JOBS.submit}
    </Button>
  )
  return (
    <Page title={JOBS.title} actions={submit} verdict={query.data && verdictOf(query.data)}>
      <Shown query={query} rows={12} empty={<Empty {...JOBS.empty} command={FIRST_COMMAND} />}>
        {(jobs) => <JobList jobs={jobs} />}
      </Shown>
    </Page>
  )
}

function verdictOf(jobs: readonly TrainingJobSummary[]): VerdictLine | undefined {
  const words = JOBS.verdict
  const counts = groupCounts(jobs)
  const { attention, training: trains } = counts
  const isRunning = trains + counts.recovering + counts.starting > 0
  const isRecoveringFirst = !attention && counts.recovering > 0
  const text = [
    attention && counts.recovering ? words.alsoRecovering(counts.recovering) : '',
    trains ? words.training(trains) : '',
    counts.starting ? words.starting(counts.starting) : '',
    counts.queued ? words.queued(counts.queued) : '',
    counts.paused ? words.paused(counts.paused) : '',
  ]
    .filter(Boolean)
    .join(' ')
  if (attention) return { tone: isUrgent(jobs) ? 'bad' : 'warn', lead: words.attention(attention), text }
  if (isRecoveringFirst) return { tone: 'busy', lead: words.recovering(counts.recovering), text }
  if (!jobs.length) return undefined
  return { tone: isRunning ? 'good' : 'idle', lead: isRunning ? words.calm : words.idle, text }
}

const isUrgent = (jobs: readonly TrainingJobSummary[]) => jobs.some((job) => job.Duty?.Urgency === 'Now')

function JobList({ jobs }: { jobs: TrainingJobSummary[] }) {
  const [search, set, field] = useAddress()
  const { mayRun } = useRole()
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set())
  const text = search.get('q') ?? ''
  const status = search.get('status') ?? ''
  const fleet = search.get('fleet') ?? ''
  const order = orderOf(search.get('sort'))
  const isReversed = search.get('reverse') === '1'
  const columns = columnsOf(search.get('columns') ?? '')
  const addressOf = useMemo(() => addressesOf(jobs), [jobs])
  const rows = useMemo(
    () => arranged(jobs, { text, status, fleet, order, isReversed }),
    [jobs, text, status, fleet, order, isReversed],
  )
  const fleets = [...new Set(jobs.map((job) => job.FleetName))].sort()
  const canStop = rows.filter((job) => chosen.has(job.RunId) && !isOver(job) && job.TrainingJobStatus !== 'Stopping')
  const choose = useCallback((run: string, isChosen: boolean) => {
    setChosen((before) => new Set(isChosen ? [...before, run] : [...before].filter((other) => other !== run)))
  }, [])
  const isFiltered = Boolean(text || status || fleet)
  return (
    <>
      <StatusSummary jobs={jobs} status={status} onChange={(next) => set({ status: next })} />
      <div className="row between">
        <div className="row">
          <Filter {...JOBS.filter} value={text} onChange={(value) => set({ q: value })} />
          <NativeSelect
            aria-label={JOBS.fleet.label}
            data={[{ value: '', label: JOBS.fleet.any }, ...fleets]}
            {...field('fleet')}
          />
          {canStop.length > 0 && <BulkActions jobs={canStop} onDone={() => setChosen(new Set())} />}
        </div>
        <div className="row">
          <span className="dim" role="status">
            {JOBS.shown(rows.length, jobs.length)}
          </span>
          <ListMenus columns={columns} search={search} set={set} />
        </div>
      </div>
      <section className="card flush joblist" tabIndex={0} aria-label={JOBS.title}>
        <Rows
          jobs={rows}
          columns={columns}
          addressOf={addressOf}
          chosen={chosen}
          onChoose={mayRun ? choose : undefined}
          order={order}
          isReversed={isReversed}
          onOrder={(next) =>
            set({
              sort: next === 'trouble' ? '' : next,
              reverse: order === next && !isReversed ? '1' : '',
            })
          }
        />
        {!rows.length && (
          <p className="empty dim">
            {JOBS.none}{' '}
            {isFiltered && (
              <Button variant="default" size="compact-xs" onClick={() => set({ q: '', status: '', fleet: '' })}>
                {JOBS.clear}
              </Button>
            )}
          </p>
        )}
      </section>
    </>
  )
}

interface Summary {
  jobs: readonly TrainingJobSummary[]
  status: string
  onChange: (status: string) => void
}

/** The number of jobs of each status. A click filters the list. */
function StatusSummary({ jobs, status, onChange }: Summary) {
  return (
    <div className="chips" role="group" aria-label={JOBS.statuses}>
      <button type="button" className="chip" aria-pressed={status === ''} onClick={() => onChange('')}>
        {JOBS.all} <span className="number">{count(jobs.length)}</span>
      </button>
      {jobsByStatus(jobs).map(({ status: name, word, tone, count: number, pressing }) => (
        <button
          key={name}
          type="button"
          className={`chip tone-${tone}`}
          aria-pressed={status === name}
          onClick={() => onChange(status === name ? '' : name)}
        >
          <ToneIcon tone={tone} size={13} /> {word}{' '}
          <span className="number" data-figure={`jobs-${name.toLowerCase()}`}>
            {count(number)}
          </span>
          {pressing > 0 && ` ${JOBS.ofThem(pressing)}`}
        </button>
      ))}
    </div>
  )
}

function BulkActions({ jobs, onDone }: { jobs: TrainingJobSummary[]; onDone: () => void }) {
  const words = JOBS.stopDialog
  const callEach = async (operation: 'PauseTrainingJob' | 'StopTrainingJob') => {
    for (const job of jobs) await call(operation, { TrainingJobName: job.RunId })
    onDone()
  }
  return (
    <>
      <ActionButton operation="PauseTrainingJob" action={() => callEach('PauseTrainingJob')}>
        {JOBS.pause(jobs.length)}
      </ActionButton>
      <ConfirmButton
        text={JOBS.stop(jobs.length)}
        name={jobs.length === 1 ? jobs[0]!.TrainingJobName : words.several(jobs.length)}
        verb={words.verb}
        onConfirm={() => callEach('StopTrainingJob')}
      >
        <p>{jobs.map((job) => job.TrainingJobName).join(', ')}</p>
        <p>{words.effect}</p>
      </ConfirmButton>
    </>
  )
}

interface Menus {
  columns: readonly Column[]
  search: URLSearchParams
  set: SetAddress
}

function ListMenus({ columns, search, set }: Menus) {
  const [open, setOpen] = useState<'columns' | 'views'>()
  const close = () => setOpen(undefined)
  return (['views', 'columns'] as const).map((name) => {
    const button = (
      <Button
        key={name}
        variant="default"
        size="xs"
        aria-haspopup="menu"
        aria-expanded={open === name}
        onClick={() => setOpen(open === name ? undefined : name)}
      >
        {JOBS.menus[name]}
      </Button>
    )
    if (open !== name) return button
    return name === 'views' ? (
      <ViewsMenu key={name} search={search} onClose={close}>
        {button}
      </ViewsMenu>
    ) : (
      <ColumnsMenu
        key={name}
        columns={columns}
        onChange={(change) =>
          set((newest) => ({ columns: columnsText(change(columnsOf(newest.get('columns') ?? ''))) }))
        }
        onClose={close}
      >
        {button}
      </ColumnsMenu>
    )
  })
}

const NUMBERS: ReadonlySet<Column> = new Set(['left', 'nodes', 'incidents', 'ettr', 'cost', 'priority', 'duration'])

interface RowsProps {
  jobs: readonly TrainingJobSummary[]
  columns: readonly Column[]
  addressOf: (job: TrainingJobSummary) => string
  chosen: ReadonlySet<string>
  /** Absent for a viewer, who has no check boxes. */
  onChoose?: (run: string, isChosen: boolean) => void
  order: Order
  isReversed: boolean
  onOrder: (order: Order) => void
}

function Rows({ jobs, columns, addressOf, chosen, onChoose, order, isReversed, onOrder }: RowsProps) {
  const body = useRef<HTMLTableSectionElement>(null)
  const isPhone = useMediaQuery('(max-width: 640px)', false, { getInitialValueInEffect: false })
  const height = isPhone ? CARD_HEIGHT : ROW_HEIGHT
  const { first, end } = useVisibleRows(body, height, jobs.length)
  const inView = useMemo(() => jobs.slice(first, end), [jobs, first, end])
  const curves = useLossCurves(columns.includes('loss') ? inView : NO_JOBS)
  const width = columns.length + (onChoose ? 1 : 0)
  return (
    <table className="grid jobs" aria-rowcount={jobs.length + 1}>
      <thead>
        <tr aria-rowindex={1}>
          {onChoose && (
            <th>
              <span className="visually-hidden">{JOBS.choose('')}</span>
            </th>
          )}
          {columns.map((column) => (
            <ColumnHead key={column} column={column} order={order} isReversed={isReversed} onOrder={onOrder} />
          ))}
        </tr>
      </thead>
      <tbody ref={body}>
        <Spacer height={first * height} width={width} />
        {inView.map((job, index) => (
          <JobRow
            key={job.RunId}
            job={job}
            index={first + index}
            address={addressOf(job)}
            columns={columns}
            curve={curves[job.RunId]?.values}
            isChosen={chosen.has(job.RunId)}
            onChoose={onChoose}
          />
        ))}
        <Spacer height={(jobs.length - end) * height} width={width} />
      </tbody>
    </table>
  )
}
const NO_JOBS: readonly TrainingJobSummary[] = []

/** A table row that takes the place of rows out of view, which are not rendered. */
function Spacer({ height, width }: { height: number; width: number }) {
  return height > 0 ? (
    <tr className="spacer" aria-hidden="true">
      <td colSpan={width} style={{ height }} />
    </tr>
  ) : null
}

interface ColumnHeadProps {
  column: Column
  order: Order
  isReversed: boolean
  onOrder: (order: Order) => void
}

function ColumnHead({ column, order, isReversed, onOrder }: ColumnHeadProps) {
  const words: { label: string; title?: string } = JOBS.columns[column]
  const own = orderOfColumn(column)
  const isOwn = own === order
  const arrow = isOwn ? (isReversed ? ' ↑' : ' ↓') : ''
  return (
    <th
      className={`c-${column}${NUMBERS.has(column) ? ' n' : ''}`}
      title={words.title}
      aria-sort={isOwn ? (isReversed ? 'descending' : 'ascending') : undefined}
    >
      {own ? (
        <button type="button" onClick={() => onOrder(own)}>
          {words.label}
          {arrow}
        </button>
      ) : (
        words.label
      )}
    </th>
  )
}
