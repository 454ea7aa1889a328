/** Logs of the ranks: one stream at a time, with search and a way to the failure. A stream is in S3 once its rank has ended or it was shipped. */
import { Button, Checkbox, Select } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useEffect, useMemo, useRef, useState } from 'react'
import { useSearchParams } from 'react-router'

import { address, logText } from '../api/client'
import { logsQuery } from '../api/queries'
import type { LogEntry, TrainingJob } from '../contract'
import { plain } from '../model/ansi'
import { bytes, count, plural } from '../model/format'
import { isOver } from '../model/verdict'
import { Empty, Filter, Shown } from '../parts/Basics'

const MOST_LINES = 5_000
const FAILURE = /traceback|error|exception|fatal|killed|segmentation|out of memory|nan loss/i

const nameOf = (entry: LogEntry) => `launch ${entry.Generation}, rank ${entry.Rank}, ${entry.Stream ?? 'missing'}${entry.Bytes === undefined ? '' : `, ${bytes(entry.Bytes)}`}`

export default function LogsTab({ job }: { job: TrainingJob }) {
  const query = useQuery(logsQuery(job.TrainingJobName))
  return (
    <Shown query={query}>
      {(logs) => {
        const stored = logs.filter((entry) => entry.Key !== undefined)
        const missing = logs.filter((entry) => entry.Key === undefined)
        return (
          <div className="stack">
            {missing.length > 0 && (
              <section className="card">
                <h2>{plural(missing.length, 'stream')} not there</h2>
                <ul>
                  {missing.slice(0, 20).map((entry) => (
                    <li key={nameOf(entry)}>
                      launch {entry.Generation}, rank {entry.Rank}: {entry.MissingReason}
                    </li>
                  ))}
                </ul>
              </section>
            )}
            {stored.length ? <Viewer job={job} logs={stored} /> : !missing.length && <Empty title="No log yet">Ranks’ streams reach S3 in pieces while they run{isOver(job) ? '; this job left none' : '; the first follows soon'}.</Empty>}
          </div>
        )
      }}
    </Shown>
  )
}

function Viewer({ job, logs }: { job: TrainingJob; logs: LogEntry[] }) {
  const [search, setSearch] = useSearchParams()
  const last = logs.toSorted((a, b) => b.Generation - a.Generation || a.Rank - b.Rank || Number((b.Bytes ?? 0) > 0) - Number((a.Bytes ?? 0) > 0))[0]!
  const entry = logs.find((each) => each.Key === search.get('stream')) ?? last
  const find = search.get('q') ?? ''
  const line = Number(search.get('line') ?? 0)
  const [isWrapped, setWrapped] = useState(false)
  const box = useRef<HTMLPreElement>(null)
  const set = (changes: Record<string, string>) => {
    const next = new URLSearchParams(search)
    for (const [key, value] of Object.entries(changes)) value ? next.set(key, value) : next.delete(key)
    setSearch(next, { replace: true, preventScrollReset: true })
  }
  const text = useQuery({
    queryKey: ['log', job.TrainingJobName, entry.Key, entry.Bytes],
    queryFn: ({ signal }) => logText(job.TrainingJobName, entry.Key!, signal),
    staleTime: Infinity,
  })
  const lines = useMemo(() => plain(text.data ?? '').replace(/\n$/, '').split('\n'), [text.data])
  const numbered = lines.map((each, index) => ({ number: index + 1, text: each }))
  const found = find ? numbered.filter((each) => each.text.toLowerCase().includes(find.toLowerCase())) : numbered
  const shown = found.slice(-MOST_LINES)
  const failure = numbered.findLast((each) => FAILURE.test(each.text))
  useEffect(() => {
    if (!box.current || !text.data) return
    const target = line ? box.current.querySelector(`[data-line="${line}"]`) : null
    if (target) target.scrollIntoView({ block: 'center' })
    else box.current.scrollTop = box.current.scrollHeight
  }, [line, text.data, entry.Key])
  return (
    <section className="card stack">
      <div className="row">
        <Select
          aria-label="Stream"
          w={310}
          searchable
          allowDeselect={false}
          data={logs.map((each) => ({ value: each.Key!, label: nameOf(each) }))}
          value={entry.Key}
          onChange={(value) => set({ stream: value ?? '', line: '' })}
        />
        <Filter label="Find in the log" placeholder="Find" value={find} onChange={(value) => set({ q: value })} />
        <Checkbox label="Wrap" checked={isWrapped} onChange={(event) => setWrapped(event.currentTarget.checked)} />
        {failure && (
          <Button size="xs" variant="default" onClick={() => set({ line: String(failure.number), q: '' })}>
            To the failure (line {count(failure.number)})
          </Button>
        )}
        <Button size="xs" variant="default" component="a" href={address('GetLog', { TrainingJobName: job.TrainingJobName, Key: entry.Key! }).url} download={`${job.TrainingJobName}-${entry.Generation}-${entry.Rank}.${entry.Stream}`}>
          Download
        </Button>
      </div>
      <Shown query={text}>
        {(body) =>
          body ? (
            <pre ref={box} className={isWrapped ? 'log wrap' : 'log'} tabIndex={0} aria-label={nameOf(entry)}>
              {shown.map((each) => (
                <span key={each.number} data-line={each.number} className={FAILURE.test(each.text) ? 'bad' : undefined} onDoubleClick={() => set({ line: String(each.number) })}>
                  {each.number === line ? <mark>{each.text}</mark> : each.text}
                  {'\n'}
                </span>
              ))}
            </pre>
          ) : (
            <p className="dim">This stream is empty.</p>
          )
        }
      </Shown>
      <p className="dim">
        {find ? `${plural(found.length, 'line')} of ${count(lines.length)} with “${find}”.` : plural(lines.length, 'line') + '.'}
        {found.length > MOST_LINES && ` The last ${count(MOST_LINES)} are shown; the download has all.`} A double click on a line puts it into the address. All ranks merged and followed: <code>everstep jobs logs {job.TrainingJobName}</code>.
      </p>
    </section>
  )
}
