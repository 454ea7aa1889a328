/** Requests the loss curves of all jobs in view together. A curve is requested again after its job has made steps. */
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useEffect, useRef } from 'react'

import type { TrainingJobSummary } from '../contract'
import { curvesToRequest, withCurves, type HeldCurves } from '../model/lossCurves'
import { call, serverTime } from './client'

const KEY = ['loss-curves']
const NONE: HeldCurves = {}
/** Milliseconds without scrolling after which the list requests the curves in view. */
const REST_MS = 150

/** Return the loaded curves by RunId, and request missing and old curves of the jobs in view. */
export function useLossCurves(inView: readonly TrainingJobSummary[]): HeldCurves {
  const client = useQueryClient()
  const held = useQuery({ queryKey: KEY, queryFn: () => NONE, enabled: false, staleTime: Infinity }).data ?? NONE
  const isBusy = useRef(false)
  useEffect(() => {
    const runs = new Set(curvesToRequest(inView, held, serverTime()))
    if (!runs.size || isBusy.current) return
    const steps = new Map(inView.filter(({ RunId }) => runs.has(RunId)).map((job) => [job.RunId, job.Boundary]))
    const request = async () => {
      isBusy.current = true
      try {
        const curves = (await call('BatchGetLossCurves', { RunIds: [...steps.keys()].join() })).LossCurves ?? []
        client.setQueryData<HeldCurves>(KEY, (before = NONE) => withCurves(before, steps, curves, serverTime()))
      } catch {
        // Show no error here, because the list of jobs shows one. Its next refresh requests these curves again.
      } finally {
        isBusy.current = false
      }
    }
    const timer = setTimeout(() => void request(), REST_MS)
    return () => clearTimeout(timer)
  }, [client, held, inView])
  return held
}
