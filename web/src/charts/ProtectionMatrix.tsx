/**
 * The holders of shards: one row for each shard, one column for each node. Shards with the fewest holders come first.
 *
 * The canvas is as large as its visible part, so 256 shards on 256 nodes scroll as smoothly as 4 on 4. A table below
 * lists every copy, also for screen readers.
 */
import { useElementSize } from '@mantine/hooks'
import { useEffect, useMemo, useRef, useState } from 'react'

import { serverTime } from '../api/client'
import type { DescribeProtectionResponse } from '../contract'
import { bytes, count, plural } from '../model/format'
import { copies, heldWords, matrix, type Cell, type Copy, type Row } from '../model/matrix'
import type { Tone } from '../model/standing'
import { Ago, NodeLink, Status } from '../parts/Basics'
import { Table } from '../parts/Table'
import { MATRIX } from '../words/jobTabs'

const ROW = 22
const COLUMN = 34
const LEFT = 150
const TOP = 64
const MOST_HEIGHT = 560
const WORDS: Readonly<Record<Cell, string>> = MATRIX.cells
const MARKS: Record<Cell, string> = { own: '●', copy: '✓', behind: '−', out: '!' }
const TONES: Record<Cell, Tone> = { own: 'busy', copy: 'good', behind: 'warn', out: 'warn' }
const MORE_COPIES = 100

export function ProtectionMatrix({ protection }: { protection: DescribeProtectionResponse }) {
  const { nodes, rows, newest } = useMemo(() => matrix(protection), [protection])
  const { ref, width } = useElementSize()
  const canvas = useRef<HTMLCanvasElement>(null)
  const [at, setAt] = useState({ x: 0, y: 0 })
  const [pointed, setPointed] = useState('')
  const height = Math.min(MOST_HEIGHT, TOP + rows.length * ROW + 2)
  const full = { width: LEFT + nodes.length * COLUMN + 8, height: TOP + rows.length * ROW + 2 }

  useEffect(() => {
    const context = canvas.current?.getContext('2d')
    if (!context || width < 10) return
    const ratio = window.devicePixelRatio || 1
    canvas.current!.width = width * ratio
    canvas.current!.height = height * ratio
    const style = getComputedStyle(document.documentElement)
    const token = (name: string) => style.getPropertyValue(`--${name}`).trim()
    context.setTransform(ratio, 0, 0, ratio, 0, 0)
    context.clearRect(0, 0, width, height)
    context.textBaseline = 'middle'
    const firstRow = Math.floor(at.y / ROW)
    const lastRow = Math.min(rows.length, Math.ceil((at.y + height - TOP) / ROW))
    const firstColumn = Math.floor(at.x / COLUMN)
    const lastColumn = Math.min(nodes.length, Math.ceil((at.x + width - LEFT) / COLUMN))
    context.font = `12px ${token('font')}`
    context.save()
    context.beginPath()
    context.rect(LEFT, TOP, width - LEFT, height - TOP)
    context.clip()
    context.textAlign = 'center'
    for (let row = firstRow; row < lastRow; row += 1) {
      for (let column = firstColumn; column < lastColumn; column += 1) {
        const cell = rows[row]!.cells.get(nodes[column]!)
        const x = LEFT + column * COLUMN - at.x
        const y = TOP + row * ROW - at.y
        context.fillStyle = cell ? token(`${TONES[cell]}-bg`) : token('card')
        context.fillRect(x, y, COLUMN - 1, ROW - 1)
        if (!cell) {
          context.strokeStyle = token('line')
          context.strokeRect(x + 0.5, y + 0.5, COLUMN - 2, ROW - 2)
          continue
        }
        context.fillStyle = token(TONES[cell])
        context.fillText(MARKS[cell], x + COLUMN / 2, y + ROW / 2)
      }
    }
    context.restore()
    context.save()
    context.beginPath()
    context.rect(0, TOP, LEFT, height - TOP)
    context.clip()
    context.textAlign = 'left'
    for (let row = firstRow; row < lastRow; row += 1) {
      const { shard, held, wanted } = rows[row]!
      const y = TOP + row * ROW - at.y + ROW / 2
      context.fillStyle = token('text')
      context.fillText(MATRIX.rank(shard.Rank), 0, y)
      context.fillStyle = token(held < wanted ? 'warn' : 'soft')
      context.fillText(`${held}/${wanted}`, 62, y)
      context.fillStyle = token(shard.CommittedStep < newest ? 'warn' : 'soft')
      context.fillText(stepText(shard.CommittedStep, newest), 96, y)
    }
    context.restore()
    context.save()
    context.beginPath()
    context.rect(LEFT, 0, width - LEFT, TOP)
    context.clip()
    context.fillStyle = token('soft')
    context.font = `12px ${token('font-mono')}`
    for (let column = firstColumn; column < lastColumn; column += 1) {
      context.save()
      context.translate(LEFT + column * COLUMN - at.x + COLUMN / 2, TOP - 8)
      context.rotate(-Math.PI / 3)
      context.fillText(`…${nodes[column]!.slice(-5)}`, 0, 0)
      context.restore()
    }
    context.restore()
  }, [at, width, height, rows, nodes, newest])

  const point = (event: React.PointerEvent<HTMLDivElement>) => {
    const box = event.currentTarget.getBoundingClientRect()
    const row = rows[Math.floor((event.clientY - box.top - TOP + at.y) / ROW)]
    const node = nodes[Math.floor((event.clientX - box.left - LEFT + at.x) / COLUMN)]
    if (!row || !node || event.clientX - box.left < LEFT || event.clientY - box.top < TOP) return setPointed('')
    const cell = row.cells.get(node)
    const holder = row.shard.Holders.find((each) => each.NodeId === node)
    const held = holder ? `, ${heldWords(holder, serverTime())}` : ''
    setPointed(MATRIX.at(cell ? WORDS[cell] : MATRIX.nothing, row.shard.Rank, node, held))
  }
  const bad = rows.filter((row) => row.hasProblem).length
  const hasParity = protection.ParityGroupSize !== undefined
  const { keys } = MATRIX
  return (
    <>
      <p>{bad ? MATRIX.bad(bad, count(rows.length)) : MATRIX.good(hasParity ? MATRIX.shares : MATRIX.copies)}</p>
      <div
        ref={ref}
        className="matrix"
        style={{ height }}
        tabIndex={0}
        role="group"
        aria-label={MATRIX.label(plural(rows.length, 'shard'), plural(nodes.length, 'node'), MATRIX.problems(bad))}
        onScroll={(event) => setAt({ x: event.currentTarget.scrollLeft, y: event.currentTarget.scrollTop })}
        onPointerMove={point}
        onPointerLeave={() => setPointed('')}
      >
        <div style={full}>
          <canvas ref={canvas} style={{ width, height }} aria-hidden="true" />
        </div>
      </div>
      <div className="keys">
        <span>{keys.own}</span>
        <span>{hasParity ? keys.parity : keys.copy}</span>
        <span>{keys.behind}</span>
        <span>{keys.out}</span>
        <span>{keys.lag}</span>
      </div>
      <p className="dim pointed" aria-live="off">
        {pointed}
      </p>
      <Copies rows={rows} newest={newest} />
    </>
  )
}

/** A shard's committed step, or how many steps it is behind the newest one. */
function stepText(step: number, newest: number): string {
  if (step < 0) return '–'
  return step < newest ? `−${count(newest - step)}` : count(step)
}

/** Every copy with its lag, the time of its verification, its failure domain, and the problem of its shard. */
function Copies({ rows, newest }: { rows: Row[]; newest: number }) {
  const all = useMemo(() => copies(rows), [rows])
  const words = MATRIX.table
  const behind = ({ row: { shard } }: Copy) =>
    shard.CommittedStep < newest ? MATRIX.behindOthers(plural(newest - shard.CommittedStep, 'step')) : ''
  return (
    <>
      <h3>{words.title}</h3>
      <Table
        label={words.title}
        page={MORE_COPIES}
        more={MATRIX.more}
        rows={all}
        keyOf={({ row, holder }) => `${row.shard.Rank} ${holder.NodeId}`}
        columns={[
          [words.rank, ({ row }) => row.shard.Rank],
          [words.node, ({ holder }) => <NodeLink id={holder.NodeId} />],
          [
            words.copies,
            ({ row: { held, wanted } }) => MATRIX.of(held, wanted),
            'n',
            ({ row: { held, wanted } }) => ({ className: held < wanted ? 'n tone-warn' : 'n' }),
          ],
          [words.state, ({ cell }) => <Status tone={TONES[cell]} word={WORDS[cell]} />],
          [words.step, ({ holder: { VerifiedStep: step } }) => (step === undefined ? '–' : count(step)), 'n'],
          [words.lag, ({ holder: { LagSteps: lag } }) => (lag === undefined ? '–' : plural(lag, 'step')), 'n'],
          [words.verified, ({ holder }) => <Ago at={holder.VerifiedTime} />, 'moment'],
          [words.domain, ({ holder }) => holder.FailureDomain ?? MATRIX.unknownDomain],
          [words.size, ({ row }) => bytes(row.shard.Bytes), 'n'],
          [words.problem, (copy) => copy.row.shard.Reason || behind(copy), 'reason'],
        ]}
      />
    </>
  )
}
