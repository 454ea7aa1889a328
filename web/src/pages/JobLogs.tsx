/** The Logs tab of a job: lines of all ranks or of one, live, with search and a link to each line. */
import { Button, Checkbox, NativeSelect } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useVirtualizer } from '@tanstack/react-virtual'
import { useEffect, useLayoutEffect, useMemo, useRef, useState, useSyncExternalStore, type ReactNode } from 'react'
import { useSearchParams } from 'react-router'

import { LogSource, UNREAD, type Filter as Wanted, type LogState } from '../api/logs'
import { useJobAddress } from '../api/addresses'
import { incidentsQuery } from '../api/queries'
import { whileVisible } from '../api/seen'
import type { Incident, TrainingJob } from '../contract'
import { marked } from '../model/ansi'
import { count, plural } from '../model/format'
import {
  asText,
  failureLine,
  hitOf,
  hits,
  lineAt,
  look,
  MOST_LINES,
  placeOf,
  readPlace,
  tellsOfFailure,
  type Line,
} from '../model/logs'
import { isOver } from '../model/standing'
import { Empty, Filter, Problem, Shown, Status } from '../parts/Basics'
import { useAddress } from '../parts/address'
import { download } from '../parts/download'
import { logsCommand } from '../words/commands'
import { LOGS } from '../words/jobTabs'

const ROW = 20
/** The next page is requested when fewer than this many lines lie between the visible lines and an end of the list. */
const NEAR = 30
/** With fewer lines than this, the box may be too empty to scroll. Buttons then load further lines. */
const FEW = 100

/**
 * Read the log of a job. A change of the filter starts to read again.
 *
 * `ms`: Unix time in milliseconds at which to begin; undefined: begin at the newest line and follow the log. Returns
 * the state, the source, and a function that reads again after an error.
 */
function useLog(job: string, filter: Wanted, ms: number | undefined): [LogState, LogSource | undefined, () => void] {
  const [tries, setTries] = useState(0)
  const [source, setSource] = useState<LogSource>()
  const { Rank, Generation, FilterPattern } = filter
  useEffect(() => {
    const created = new LogSource(job, { Rank, Generation, FilterPattern })
    setSource(created)
    let stop: (() => void) | undefined
    let isClosed = false
    void created.start(ms === undefined ? { at: 'end' } : { at: 'time', ms }).then(() => {
      if (ms === undefined && !isClosed)
        stop = whileVisible(
          () => created.follow(),
          () => created.pause(),
        )
    })
    return () => {
      isClosed = true
      stop?.()
      created.close()
    }
  }, [job, Rank, Generation, FilterPattern, ms, tries])
  const state = useSyncExternalStore(source?.subscribe ?? (() => () => undefined), source?.snapshot ?? (() => UNREAD))
  return [state, source, () => setTries((before) => before + 1)]
}

export default function LogsTab({ job }: { job: TrainingJob }) {
  const [search] = useSearchParams()
  const incidents = useQuery(incidentsQuery(useJobAddress(job)))
  const failure = search.get('failure')
  if (job.Generation < 1) return <Empty title={LOGS.none} text={LOGS.noneText} />
  if (!failure) return <Viewer job={job} incidents={incidents.data} />
  return (
    <Shown query={incidents}>
      {(all) => <Viewer job={job} incidents={all} failure={all.find((each) => each.IncidentId === failure)} />}
    </Shown>
  )
}

const numberOf = (text: string | null): number | undefined =>
  text && /^\d{1,9}$/.test(text) ? Number(text) : undefined

type View = ReturnType<typeof useView>

/** Return the view of the log that the page's URL describes. */
function useView() {
  const [search, set] = useAddress()
  const find = search.get('q') ?? ''
  return {
    rank: numberOf(search.get('rank')),
    launch: numberOf(search.get('launch')),
    find,
    isNarrow: search.get('only') === '1' && find !== '',
    set,
  }
}

function Viewer({ job, incidents, failure }: { job: TrainingJob; incidents?: Incident[]; failure?: Incident }) {
  const [search] = useSearchParams()
  const view = useView()
  const { rank, launch, find, isNarrow, set } = view
  const name = useJobAddress(job)
  const place = readPlace(search.get('at') ?? '')
  const [isWrapped, setWrapped] = useState(false)
  const [chosen, setChosen] = useState<number>()
  const from = place?.at ?? (failure ? failure.FailedAt * 1000 : undefined)
  const filter = { Rank: rank, Generation: launch, FilterPattern: isNarrow ? find : undefined }
  const [state, source, again] = useLog(name, filter, from)
  const { lines } = state
  const target = useMemo(
    () => (place ? lineAt(place, lines) : failure ? failureLine(failure, lines) : undefined),
    [search.get('at'), failure, lines],
  )
  const matches = useMemo(() => (isNarrow ? [] : hits(lines, find)), [find, isNarrow, lines])
  const hit = hitOf(matches, chosen)
  useEffect(() => setChosen(hit), [hit])
  const newest = (incidents ?? []).filter((each) => each.RunId === job.RunId).at(-1)
  const nth = matches.findIndex((number) => number === hit)
  const go = (by: number) => setChosen(matches[(nth + by + matches.length) % Math.max(1, matches.length)])
  const isFollowing = state.isLive || (source !== undefined && from === undefined && !state.isOver)
  const waiting = isFollowing ? LOGS.connecting : LOGS.notFollowing
  const mode = state.isLive ? LOGS.following : state.isOver ? LOGS.complete : waiting
  const tone = state.isLive ? 'good' : isFollowing && !state.isOver ? 'warn' : 'idle'
  return (
    <section className="card stack">
      <div className="row">
        <Choices job={job} view={view} />
        <Filter
          label={LOGS.find}
          placeholder={LOGS.findPlaceholder}
          value={find}
          onChange={(value) => set({ q: value })}
        />
        {find && !isNarrow && (
          <span className="row" role="group" aria-label={LOGS.hits}>
            <span className="dim">{matches.length ? LOGS.hit(count(nth + 1), count(matches.length)) : LOGS.noHit}</span>
            <Small isDisabled={!matches.length} onClick={() => go(-1)}>
              {LOGS.previous}
            </Small>
            <Small isDisabled={!matches.length} onClick={() => go(1)}>
              {LOGS.next}
            </Small>
          </span>
        )}
        <Checkbox
          label={LOGS.only}
          checked={isNarrow}
          disabled={!find}
          onChange={(event) => set({ only: event.currentTarget.checked ? '1' : '' })}
        />
        <Checkbox label={LOGS.wrap} checked={isWrapped} onChange={(event) => setWrapped(event.currentTarget.checked)} />
      </div>
      <div className="row between">
        <div className="row">
          <Status tone={tone} {...mode} />
          {from !== undefined && !state.isOver && (
            <Small onClick={() => set({ at: '', failure: '' })}>{LOGS.toNewest}</Small>
          )}
          {newest && failure?.IncidentId !== newest.IncidentId && (
            <Small onClick={() => set({ failure: newest.IncidentId, at: '', launch: '', rank: '', q: '', only: '' })}>
              {LOGS.toFailure}
            </Small>
          )}
          {failure && <span className="dim">{LOGS.atIncident(failure.IncidentId)}</span>}
        </div>
        <div className="row">
          <span className="dim">{LOGS.loaded(plural(lines.length, 'line'), lines.length >= MOST_LINES)}</span>
          <Small isDisabled={!lines.length} onClick={() => download(`${name}.log`, lines.map(asText))}>
            {LOGS.download}
          </Small>
        </div>
      </div>
      {state.error !== undefined && <Problem error={state.error} title={LOGS.broken} retry={again} />}
      {lines.length || state.isBusy ? (
        <Lines
          key={`${search.get('at')} ${failure?.IncidentId} ${rank} ${launch} ${isNarrow}`}
          state={state}
          source={source}
          target={target}
          hit={hit}
          find={find}
          isWrapped={isWrapped}
          isMerged={rank === undefined}
          onPlace={(line) => set({ at: placeOf(line, lines), failure: '', q: '', only: '' })}
        />
      ) : (
        <p className="dim">{emptyWords(state, isNarrow, isOver(job))}</p>
      )}
      {!state.isBusy && state.error === undefined && lines.length < (isNarrow || rank !== undefined ? FEW : 1) && (
        <div className="row">
          {state.hasOlder && <Small onClick={() => void source?.older()}>{LOGS.back}</Small>}
          {!state.isAtEnd && <Small onClick={() => void source?.newer()}>{LOGS.on}</Small>}
        </div>
      )}
      <p className="dim">
        {LOGS.hint} <code>{logsCommand(name, rank)}</code>
      </p>
    </section>
  )
}

function emptyWords(state: LogState, isNarrow: boolean, isJobOver: boolean): string {
  if (state.hasOlder || !state.isAtEnd) return LOGS.notFoundYet
  return isNarrow ? LOGS.noMatch : isJobOver ? LOGS.nothing : LOGS.nothingYet
}

/** The choice of a rank and of a launch. */
function Choices({ job, view: { rank, launch, set } }: { job: TrainingJob; view: View }) {
  const ranks = Array.from({ length: job.NodeCount * job.RanksPerNode }, (_, each) => each)
  const launches = Array.from({ length: job.Generation }, (_, each) => job.Generation - each)
  return (
    <>
      <NativeSelect
        aria-label={LOGS.rank}
        value={rank ?? ''}
        onChange={(event) => set({ rank: event.currentTarget.value, at: '' })}
        data={choicesOf(LOGS.allRanks, ranks, LOGS.rankOf)}
      />
      <NativeSelect
        aria-label={LOGS.launch}
        value={launch ?? ''}
        onChange={(event) => set({ launch: event.currentTarget.value, at: '', failure: '' })}
        data={choicesOf(LOGS.allLaunches, launches, LOGS.launchOf)}
      />
    </>
  )
}

/** The choices of a select: all, then one for each number. */
const choicesOf = (all: string, numbers: readonly number[], label: (number: number) => string) => [
  { value: '', label: all },
  ...numbers.map((each) => ({ value: String(each), label: label(each) })),
]

interface SmallProps {
  isDisabled?: boolean
  onClick: () => void
  children: ReactNode
}

function Small({ isDisabled = false, onClick, children }: SmallProps) {
  return (
    <Button size="compact-sm" variant="default" disabled={isDisabled} onClick={onClick}>
      {children}
    </Button>
  )
}

interface LinesProps {
  state: LogState
  source?: LogSource
  target?: Line
  /** The number of the current match. */
  hit?: number
  find: string
  isWrapped: boolean
  isMerged: boolean
  onPlace: (line: Line) => void
}

/** The list of lines, which draws only the visible ones. It stays at the newest line until the reader scrolls up. */
function Lines({ state, source, target, hit, find, isWrapped, isMerged, onPlace }: LinesProps) {
  const { lines } = state
  const box = useRef<HTMLDivElement>(null)
  const [isPinned, setPinned] = useState(target === undefined)
  const first = lines[0]?.number ?? 0
  const before = useRef(first)
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => box.current,
    estimateSize: () => ROW,
    getItemKey: (index) => lines[index]?.number ?? index,
    overscan: 20,
  })
  useEffect(() => virtual.measure(), [isWrapped, virtual])
  useLayoutEffect(() => {
    const more = before.current - first
    before.current = first
    // Older lines shift the index of every line. The offset keeps the visible line where it is.
    if (more > 0 && box.current && !isPinned) virtual.scrollToOffset(box.current.scrollTop + more * ROW)
  }, [first, isPinned, virtual])
  const shown = hit ?? target?.number
  const index = shown === undefined ? -1 : lines.findIndex((line) => line.number === shown)
  useEffect(() => {
    if (index < 0) return
    setPinned(false)
    virtual.scrollToIndex(index, { align: 'center' })
    if (hit === undefined) box.current?.scrollIntoView({ block: 'nearest' }) // show the line that a link names
  }, [shown, virtual])
  const last = lines.at(-1)?.number
  useLayoutEffect(() => {
    if (isPinned && lines.length) virtual.scrollToIndex(lines.length - 1, { align: 'end' })
  }, [last, isPinned, virtual])
  const items = virtual.getVirtualItems()
  const top = items[0]?.index ?? 0
  const bottom = items.at(-1)?.index ?? 0
  useEffect(() => {
    if (!lines.length || state.isBusy || state.error !== undefined) return // only a person retries after an error
    if (!isPinned && box.current!.scrollTop < NEAR * ROW) void source?.older() // `top` may lag
    if (bottom >= lines.length - NEAR) void source?.newer()
  }, [top, bottom, lines.length, state.isBusy, state.error, isPinned, source])
  return (
    <div className="logbox">
      <div
        ref={box}
        className={isWrapped ? 'log wrap' : 'log'}
        role="log"
        aria-live="off"
        aria-label={LOGS.box}
        tabIndex={0}
        onScroll={(event) => {
          const { scrollHeight, scrollTop, clientHeight } = event.currentTarget
          setPinned(scrollHeight - scrollTop - clientHeight < ROW)
        }}
      >
        <div style={{ height: virtual.getTotalSize(), position: 'relative' }}>
          {items.map((item) => {
            const line = lines[item.index]!
            return (
              <div
                key={item.key}
                ref={isWrapped ? virtual.measureElement : undefined}
                data-index={item.index}
                className={[
                  'line',
                  line.stream,
                  tellsOfFailure(line) ? 'bad' : '',
                  item.index === index ? 'here' : '',
                ].join(' ')}
                style={{ transform: `translateY(${item.start}px)` }}
              >
                <button
                  type="button"
                  className="when"
                  title={`${new Date(line.at).toISOString()}, ${line.nodeId}`}
                  onClick={() => onPlace(line)}
                >
                  {new Date(line.at).toISOString().slice(11, 23)}
                </button>
                {isMerged && <span className="who">{line.rank === undefined ? LOGS.node : `r${line.rank}`}</span>}
                <span className="what">
                  {marked(look(line), find).map((piece, each) =>
                    piece.isMarked ? (
                      <mark key={each}>{piece.text}</mark>
                    ) : (
                      <span key={each} className={piece.look || undefined}>
                        {piece.text}
                      </span>
                    ),
                  )}
                </span>
              </div>
            )
          })}
        </div>
      </div>
      {!isPinned && state.isLive && (
        <Button className="tolast" size="compact-sm" onClick={() => setPinned(true)}>
          {LOGS.newLines}
        </Button>
      )}
    </div>
  )
}
